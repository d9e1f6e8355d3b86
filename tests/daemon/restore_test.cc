// An engine that continues with what another engine left in a folder.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <fstream>

#include "daemon/engine/engine.h"
#include "daemon/store/store.h"
#include "tests/daemon/engine_fixture.h"
#include "tests/host/memory/scratch_folder.h"

namespace spillway {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

constexpr int64_t kLimit = int64_t{64} << 20;

// One process after the other, each with an engine on a device that answers when the test tells it
// to.
class RestoreTest : public ::testing::Test {
 protected:
  struct Process {
    // The engine's destructor waits for its rebuild.
    ~Process() { device.ReleaseAll(); }

    MemoryBudget budget{kLimit};
    ToyDevice device{false};
    std::unique_ptr<Store> store;
    std::unique_ptr<Arena> arena;
    std::optional<Engine> engine;
    // Ids of the sequences that were rebuilt, and of the others with the reason.
    std::vector<std::string> rebuilt;
    std::vector<std::string> failed;
  };

  std::unique_ptr<Process> Open() {
    auto process = std::make_unique<Process>();
    process->store = *Store::Open(scratch.path(), &process->budget);
    ArenaOptions options;
    options.limit_bytes = kLimit / 2;
    options.extent_bytes = kSlabBytes;
    options.touch_thread_count = 1;
    process->arena = *Arena::Create(options, &process->budget, {}, process->store->TakeRows());
    EngineOptions engine_options;
    engine_options.clock = [this] { return now; };
    engine_options.unnamed_grace = absl::Seconds(60);
    engine_options.store = process->store.get();
    process->engine.emplace(&process->device, process->arena.get(), &process->budget,
                            std::move(engine_options));
    return process;
  }
  static absl::StatusOr<RestoreReport> Restore(Process& process) {
    return process.engine->Restore(
        [&process](const Sequence& sequence, const absl::Status& status) {
          if (status.ok()) {
            process.rebuilt.push_back(sequence.id);
          } else {
            process.failed.push_back(sequence.id + ": " + std::string(status.message()));
          }
        });
  }
  std::unique_ptr<Process> Start() {
    auto process = Open();
    const auto report = Restore(*process);
    EXPECT_TRUE(report.ok()) << report.status();
    return process;
  }

  // Stops the rebuild while the device keeps answering, so some sequences may still be rebuilt.
  static void Stop(Process& process) {
    std::thread stop([&] { process.engine->StopRebuilding(); });
    for (RebuildProgress seen;
         seen.done_count + seen.failed_count < seen.sequence_count || seen.sequence_count == 0;
         seen = process.engine->rebuild_progress()) {
      process.device.ReleaseAll();
      std::this_thread::yield();
    }
    stop.join();
  }

  static std::shared_ptr<Model> NewModel(Process& process) {
    ModelSpec spec;
    spec.layer_count = 2;
    spec.query_head_count = 1;
    spec.kv_head_count = 1;
    spec.head_dim = 16;
    spec.dtype = DType::kF32;
    spec.hash.kind = HashKind::kNone;
    EXPECT_TRUE(Normalize(spec).empty());
    return *process.engine->CreateModel("m", spec, DefaultPolicy(spec));
  }
  static std::shared_ptr<Sequence> NewSequence(Process& process, const std::string& id) {
    const std::shared_ptr<Model> model = *process.engine->registry().FindModel("m");
    return *process.engine->CreateSequence(id, model, model->policy, absl::InfiniteDuration());
  }
  static std::shared_ptr<Sequence> Fork(Process& process, const std::shared_ptr<Sequence>& source,
                                        const std::string& id) {
    std::shared_ptr<Sequence> fork;
    process.engine->Fork(source, id, [&](absl::StatusOr<std::shared_ptr<Sequence>> made) {
      ASSERT_TRUE(made.ok()) << made.status();
      fork = *std::move(made);
    });
    return fork;
  }
  // All elements of the rows of token t are tag + t.
  static absl::Status Append(Process& process, const std::shared_ptr<Sequence>& sequence, float tag,
                             int64_t start, int64_t count) {
    std::vector<float> rows;
    for (int layer = 0; layer < 2; ++layer) {
      for (int64_t t = start; t < start + count; ++t) {
        rows.insert(rows.end(), 16, tag + static_cast<float>(t));
      }
    }
    const auto source = ChunkSource::Dense(rows.data(), 1, count, 16 * sizeof(float));
    Chunk chunk;
    chunk.layer_count = 2;
    chunk.start = start;
    chunk.count = count;
    chunk.k = chunk.v = source;
    std::optional<absl::StatusOr<AppendOutcome>> result;
    process.engine->Append({sequence, chunk, nullptr},
                           [&](absl::StatusOr<AppendOutcome> r) { result.emplace(std::move(r)); });
    process.device.ReleaseAll();
    return result->status();
  }
  // The result of an attend of layer 0; empty until it is answered.
  using Asked = std::shared_ptr<std::optional<absl::StatusOr<AttendOutcome>>>;
  Asked Ask(Process& process, const std::shared_ptr<Sequence>& sequence) {
    AttendRequest request;
    AttendItem& item = request.items.emplace_back();
    item.sequence = sequence;
    item.attend.policy = sequence->model->policy;
    item.attend.q = reinterpret_cast<const std::byte*>(query.data());
    item.attend.query_count = 1;
    auto asked = std::make_shared<std::optional<absl::StatusOr<AttendOutcome>>>();
    process.engine->Attend(std::move(request), [asked](absl::StatusOr<AttendOutcome> outcome) {
      asked->emplace(std::move(outcome));
    });
    return asked;
  }

  ScratchFolder scratch;
  SteadyTime now = SteadyTime(std::chrono::hours(300));
  std::vector<float> query = std::vector<float>(16, 1.0f);
};

TEST_F(RestoreTest, RequestsWaitForTheirSequenceAndSeeItsRows) {
  {
    auto first = Start();
    NewModel(*first);
    ASSERT_TRUE(Append(*first, NewSequence(*first, "a"), 1000, 0, 300).ok());
    ASSERT_TRUE(Append(*first, NewSequence(*first, "b"), 5000, 0, 200).ok());
    NewSequence(*first, "empty");
  }
  auto second = Open();
  const RestoreReport report = *Restore(*second);
  EXPECT_EQ(report.model_count, 1);
  EXPECT_EQ(report.sequence_count, 3);
  EXPECT_EQ(report.token_count, 500);
  EXPECT_TRUE(report.lost.empty());
  // A sequence with nothing to rebuild is ready at once. All lengths are known at once.
  EXPECT_THAT(second->rebuilt, ElementsAre("empty"));
  const auto a = *second->engine->registry().FindSequence("a");
  const auto b = *second->engine->registry().FindSequence("b");
  EXPECT_THAT(a->snapshot().layer_token_counts, ElementsAre(300, 300));
  const Asked of_b = Ask(*second, b);
  EXPECT_FALSE(of_b->has_value());
  EXPECT_EQ(second->engine->rebuild_progress().done_count, 1);
  second->device.ReleaseAll();
  ASSERT_TRUE(of_b->has_value());
  const JobItem& item = (**of_b)->job->items.front();
  ASSERT_TRUE(item.status.ok()) << item.status;
  EXPECT_EQ(item.result.out[0], 200);
  EXPECT_EQ(item.result.lse[0], 5199);
  EXPECT_THAT(second->rebuilt, ::testing::UnorderedElementsAre("a", "b", "empty"));
  const RebuildProgress progress = second->engine->rebuild_progress();
  EXPECT_EQ(progress.sequence_count, 3);
  EXPECT_EQ(progress.done_count, 3);
  EXPECT_EQ(progress.failed_count, 0);
  EXPECT_EQ(progress.row_bytes, 500 * 2 * 2 * 16 * 4);
  // Appends continue.
  EXPECT_TRUE(Append(*second, a, 1000, 300, 1).ok());
}

TEST_F(RestoreTest, WhatIsUndoneIsNotKept) {
  {
    auto first = Start();
    NewModel(*first);
    const auto sequence = NewSequence(*first, "a");
    ASSERT_TRUE(Append(*first, sequence, 0, 0, 100).ok());
    first->device.FailAppend(absl::InternalError("no"));
    EXPECT_FALSE(Append(*first, sequence, 0, 100, 100).ok());
    bool cut = false;
    first->engine->Truncate(sequence, 60, [&](const absl::Status& status) { cut = status.ok(); });
    EXPECT_TRUE(cut);
  }
  auto second = Start();
  const SequenceSnapshot snapshot = (*second->engine->registry().FindSequence("a"))->snapshot();
  EXPECT_THAT(snapshot.layer_token_counts, ElementsAre(60, 60));
  EXPECT_EQ(snapshot.generation, 1);
}

TEST_F(RestoreTest, OneThatCannotBeRebuiltIsRefusedAndKeepsItsRows) {
  {
    auto first = Start();
    NewModel(*first);
    ASSERT_TRUE(Append(*first, NewSequence(*first, "a"), 1000, 0, 300).ok());
  }
  {
    auto second = Open();
    second->device.FailPrepare(absl::ResourceExhaustedError("no room for codes"));
    ASSERT_TRUE(Restore(*second).ok());
    EXPECT_THAT(second->failed, ElementsAre("a: no room for codes"));
    const auto a = *second->engine->registry().FindSequence("a");
    EXPECT_EQ(a->snapshot().token_count, 300);
    const Asked asked = Ask(*second, a);
    ASSERT_TRUE(asked->has_value());
    EXPECT_TRUE(absl::IsResourceExhausted((*asked)->status()));
    EXPECT_THAT(std::string((*asked)->status().message()),
                HasSubstr("sequences/a is kept but cannot be served: no room for codes"));
    EXPECT_FALSE(Append(*second, a, 1000, 300, 1).ok());
    EXPECT_EQ(second->engine->rebuild_progress().failed_count, 1);
  }
  auto third = Start();
  third->device.ReleaseAll();
  EXPECT_THAT(third->rebuilt, ElementsAre("a"));
  // The pages belonged to this sequence only, and are free after its deletion.
  std::optional<absl::Status> deleted;
  third->engine->Delete("a", [&](absl::Status status) { deleted = std::move(status); });
  ASSERT_TRUE(deleted.has_value());
  EXPECT_TRUE(deleted->ok());
  EXPECT_EQ(third->arena->statistics().used_bytes, 0);
}

TEST_F(RestoreTest, AStopInMidRebuildLosesNothing) {
  {
    auto first = Start();
    NewModel(*first);
    for (int i = 0; i < 6; ++i) {
      ASSERT_TRUE(Append(*first, NewSequence(*first, "s" + std::to_string(i)), 1000, 0, 300).ok());
    }
  }
  {
    auto second = Start();
    const auto last = *second->engine->registry().FindSequence("s5");
    const Asked asked = Ask(*second, last);
    Stop(*second);
    ASSERT_TRUE(asked->has_value());
    const absl::Status& status = (*asked)->status();
    EXPECT_TRUE(status.ok() || absl::IsUnavailable(status)) << status;
    EXPECT_EQ(second->rebuilt.size() + second->failed.size(), 6u);
  }
  auto third = Start();
  third->device.ReleaseAll();
  EXPECT_EQ(third->rebuilt.size(), 6u);
}

TEST_F(RestoreTest, CodesOfWhatForksShareAreMadeOnce) {
  {
    auto first = Start();
    NewModel(*first);
    const auto a = NewSequence(*first, "a");
    ASSERT_TRUE(Append(*first, a, 1000, 0, 300).ok());
    const auto b = Fork(*first, a, "b");
    ASSERT_TRUE(Append(*first, b, 5000, 300, 300).ok());
    ASSERT_TRUE(Append(*first, Fork(*first, b, "c"), 7000, 600, 1).ok());
    // Begins with the same rows as a, but shares no page with it.
    ASSERT_TRUE(Append(*first, NewSequence(*first, "d"), 1000, 0, 300).ok());
  }
  auto second = Open();
  ASSERT_TRUE(Restore(*second).ok());
  EXPECT_EQ(second->engine->rebuild_progress().sequence_count, 4);
  const auto c = *second->engine->registry().FindSequence("c");
  const Asked of_c = Ask(*second, c);
  EXPECT_FALSE(of_c->has_value());
  second->device.ReleaseAll();
  ASSERT_TRUE(of_c->has_value());
  const JobItem& item = (**of_c)->job->items.front();
  ASSERT_TRUE(item.status.ok()) << item.status;
  EXPECT_EQ(item.result.out[0], 601);
  EXPECT_EQ(item.result.lse[0], 7600);
  EXPECT_THAT(second->rebuilt, ::testing::UnorderedElementsAre("a", "b", "c", "d"));
  // Whole pages of 128 tokens are encoded once: two of a, b and c, and two more of b and c. Added
  // are the rest of each, and d. The order of the sequences does not matter.
  const int64_t tokens = 4 * 128 + (300 - 2 * 128) + (600 - 4 * 128) + (601 - 4 * 128) + 300;
  EXPECT_EQ(second->engine->rebuild_progress().row_bytes, tokens * 2 * 2 * 16 * 4);
  // Each of them can be appended to on its own.
  for (const char* id : {"a", "b", "c"}) {
    const auto sequence = *second->engine->registry().FindSequence(id);
    const int64_t length = sequence->snapshot().token_count;
    EXPECT_TRUE(Append(*second, sequence, 9000, length, 1).ok()) << id;
  }
}

TEST_F(RestoreTest, AForkIsRebuiltWhereItsSourceIsNot) {
  {
    auto first = Start();
    NewModel(*first);
    const auto a = NewSequence(*first, "a");
    ASSERT_TRUE(Append(*first, a, 1000, 0, 300).ok());
    Fork(*first, a, "b");
  }
  auto second = Open();
  second->device.FailPrepare(absl::ResourceExhaustedError("no room for codes"));
  ASSERT_TRUE(Restore(*second).ok());
  EXPECT_EQ(second->failed.size(), 1u);
  second->device.ReleaseAll();
  EXPECT_EQ(second->rebuilt.size(), 1u);
  EXPECT_EQ(second->engine->rebuild_progress().row_bytes, 300 * 2 * 2 * 16 * 4);
}

TEST_F(RestoreTest, AStopBeforeForksAreRebuiltWaitsForAll) {
  {
    auto first = Start();
    NewModel(*first);
    auto sequence = NewSequence(*first, "s0");
    ASSERT_TRUE(Append(*first, sequence, 1000, 0, 300).ok());
    for (int i = 1; i < 10; ++i) {
      sequence = Fork(*first, sequence, "s" + std::to_string(i));
      ASSERT_TRUE(Append(*first, sequence, 1000, i * 300, 300).ok());
    }
  }
  {
    auto second = Start();
    Stop(*second);
    EXPECT_EQ(second->rebuilt.size() + second->failed.size(), 10u);
  }
  auto third = Start();
  third->device.ReleaseAll();
  EXPECT_EQ(third->rebuilt.size(), 10u);
}

TEST_F(RestoreTest, ASequenceWhoseRecordIsDamagedIsLostAlone) {
  {
    auto first = Start();
    NewModel(*first);
    ASSERT_TRUE(Append(*first, NewSequence(*first, "good"), 1000, 0, 300).ok());
    const auto bad = NewSequence(*first, "bad");
    ASSERT_TRUE(Append(*first, bad, 2000, 0, 300).ok());
    // A page number far beyond the end of the row file.
    bad->record->layer(1).SetPageIndex(0, 2, 0x7FFFFF00);
  }
  auto second = Open();
  const RestoreReport report = *Restore(*second);
  ASSERT_EQ(report.lost.size(), 1u);
  EXPECT_THAT(std::string(report.lost[0].message()), HasSubstr("sequences/bad: page"));
  EXPECT_EQ(report.sequence_count, 1);
  second->device.ReleaseAll();
  EXPECT_THAT(second->rebuilt, ElementsAre("good"));
  NewSequence(*second, "bad");
}

TEST_F(RestoreTest, AModelThatThisBuildDoesNotKnowStopsTheStart) {
  {
    auto first = Start();
    NewModel(*first);
    NewSequence(*first, "a");
  }
  {
    std::fstream file(scratch.File("records"), std::ios::in | std::ios::out | std::ios::binary);
    std::string text(int64_t{2} << 20, '\0');
    file.read(text.data(), static_cast<std::streamsize>(text.size()));
    const size_t at = text.find("\"kind\":\"none\"");
    const size_t named = at == std::string::npos ? text.find("\"hash.kind\":\"none\"") : at;
    ASSERT_NE(named, std::string::npos);
    const size_t value = text.find("none", named);
    file.seekp(static_cast<std::streamoff>(value));
    file.write("moon", 4);
  }
  auto second = Open();
  const absl::Status status = Restore(*second).status();
  EXPECT_TRUE(absl::IsFailedPrecondition(status)) << status;
  EXPECT_THAT(std::string(status.message()), HasSubstr("hash.kind is moon"));
}

// The names of the sequences that have expired.
std::vector<std::string> Swept(Engine& engine) {
  std::vector<std::string> names;
  for (const ExpiredSequence& expired : engine.SweepExpired()) names.push_back(expired.name);
  return names;
}

TEST_F(RestoreTest, TheGraceOfWhatNobodyNamedBeginsAnew) {
  auto first = Start();
  NewModel(*first);
  const std::shared_ptr<Presence> gone = first->engine->ClientOf("gone");
  const std::shared_ptr<Presence> there = first->engine->ClientOf("there");
  const auto make = [&](const std::string& id, const Origin& origin) {
    const std::shared_ptr<Model> model = *first->engine->registry().FindModel("m");
    const auto made =
        first->engine->CreateSequence(id, model, model->policy, absl::InfiniteDuration(), origin);
    EXPECT_TRUE(made.ok());
  };
  make("named", {true, gone});
  make("of-gone", {false, gone});
  make("of-there", {false, there});
  make("of-unknown", {false, nullptr});
  make("kept", {false, gone});
  ASSERT_TRUE(first->engine->registry().UseSequence("kept", nullptr).ok());
  now += std::chrono::seconds(50);
  first.reset();
  now += std::chrono::hours(1);

  auto second = Start();
  second->device.ReleaseAll();
  now += std::chrono::seconds(59);
  EXPECT_THAT(Swept(*second->engine), ElementsAre());
  // This client connects, but calls nothing that names its sequence.
  second->engine->clients().Come(*second->engine->ClientOf("there"));
  now += std::chrono::seconds(1);
  EXPECT_THAT(Swept(*second->engine), ElementsAre("sequences/of-gone"));
  now += std::chrono::hours(10);
  EXPECT_THAT(Swept(*second->engine), ElementsAre());
  EXPECT_EQ(second->engine->registry().sequence_count(), 4);
  second.reset();

  // The others stay in later processes too. The client `there` has not connected to this one.
  auto third = Start();
  third->device.ReleaseAll();
  now += std::chrono::hours(10);
  EXPECT_THAT(Swept(*third->engine), ElementsAre("sequences/of-there"));
  EXPECT_EQ(third->engine->registry().sequence_count(), 3);
}

}  // namespace
}  // namespace spillway
