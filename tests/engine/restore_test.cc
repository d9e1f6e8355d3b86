// An engine that continues with what another engine left in a folder.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <fstream>
#include <random>

#include "engine/engine.h"
#include "engine/store/store.h"
#include "tests/engine/engine_fixture.h"
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
  static std::shared_ptr<Sequence> NewSequence(Process& process, const std::string& id,
                                               absl::Duration ttl = absl::InfiniteDuration()) {
    const std::shared_ptr<Model> model = *process.engine->registry().FindModel("m");
    return *process.engine->CreateSequence(id, model, model->policy, ttl);
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
    chunk.generation = sequence->snapshot().generation;
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

  // Replaces the first `from` in the file of records by bytes of the same number.
  void ChangeRecords(const std::string& from, const std::string& to) const {
    std::fstream file(scratch.File("records"), std::ios::in | std::ios::out | std::ios::binary);
    std::string text(int64_t{2} << 20, '\0');
    file.read(text.data(), static_cast<std::streamsize>(text.size()));
    const size_t at = text.find(from);
    ASSERT_NE(at, std::string::npos);
    file.seekp(static_cast<std::streamoff>(at));
    file.write(to.data(), static_cast<std::streamsize>(to.size()));
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
    *bad->record->layer(1).length_word() ^= 1 << 5;
  }
  auto second = Open();
  const RestoreReport report = *Restore(*second);
  ASSERT_EQ(report.lost.size(), 1u);
  EXPECT_THAT(std::string(report.lost[0].message()),
              ::testing::MatchesRegex("sequences/bad: record [0-9]+, at byte [0-9]+ of "
                                      "/.*/records: a layer's length .* is damaged"));
  EXPECT_TRUE(report.damaged.empty());
  EXPECT_EQ(report.sequence_count, 1);
  EXPECT_EQ(second->engine->rebuild_progress().lost_count, 1);
  second->device.ReleaseAll();
  EXPECT_THAT(second->rebuilt, ElementsAre("good"));
  // Its memory is free, and so is its id.
  EXPECT_EQ((*second->engine->registry().FindModel("m"))->row_pool.used_page_count(), 2 * 3);
  NewSequence(*second, "bad");
}

// A bit of the rows, or a page's number or its checksum in the record: the sequence is cut there.
TEST_F(RestoreTest, DamagedRowsAreCutOff) {
  {
    auto first = Start();
    NewModel(*first);
    const auto a = NewSequence(*first, "a");
    ASSERT_TRUE(Append(*first, a, 1000, 0, 600).ok());
    Fork(*first, a, "fork");
    bool cut = false;
    const auto early = Fork(*first, a, "early");
    first->engine->Truncate(early, 200, [&](const absl::Status& s) { cut = s.ok(); });
    EXPECT_TRUE(cut);
    ASSERT_TRUE(Append(*first, NewSequence(*first, "open"), 2000, 0, 300).ok());
    const auto index = NewSequence(*first, "index");
    ASSERT_TRUE(Append(*first, index, 3000, 0, 300).ok());
    const auto sum = NewSequence(*first, "sum");
    ASSERT_TRUE(Append(*first, sum, 4000, 0, 300).ok());
    ASSERT_TRUE(Append(*first, NewSequence(*first, "good"), 5000, 0, 300).ok());
    const auto flip = [](const LayerRows& rows, int64_t token) {
      auto* const row = const_cast<std::byte*>(rows.Row(0, token));
      row[5] ^= std::byte{4};
    };
    flip(a->rows[1], 260);
    flip((*first->engine->registry().FindSequence("open"))->rows[0], 299);
    index->record->layer(0).SetPageSum(0, 2, 7);  // of the open page: means nothing
    sum->record->layer(1).SetPageSum(0, 1, 7);
  }
  auto second = Open();
  const RestoreReport report = *Restore(*second);
  EXPECT_TRUE(report.lost.empty());
  std::vector<std::string> damaged;
  for (const DamagedRows& rows : report.damaged) {
    damaged.push_back(absl::StrCat(rows.name, " layer ", rows.layer, " kept ", rows.token_count,
                                   " lost ", rows.lost_token_count));
  }
  EXPECT_THAT(damaged, ::testing::UnorderedElementsAre("sequences/a layer 1 kept 256 lost 344",
                                                       "sequences/fork layer 1 kept 256 lost 344",
                                                       "sequences/open layer 0 kept 256 lost 44",
                                                       "sequences/sum layer 1 kept 128 lost 172"));
  EXPECT_EQ(second->engine->rebuild_progress().damaged_count, 4);
  second->device.ReleaseAll();
  const auto expect = [&](const std::string& id, int64_t length, int64_t generation) {
    const auto sequence = *second->engine->registry().FindSequence(id);
    EXPECT_THAT(sequence->snapshot().layer_token_counts, ElementsAre(length, length)) << id;
    EXPECT_EQ(sequence->snapshot().generation, generation) << id;
    EXPECT_EQ(sequence->rows[1].token_count(), length) << id;
  };
  expect("a", 256, 1);
  expect("fork", 256, 1);
  expect("early", 200, 1);
  expect("open", 256, 1);
  expect("index", 300, 0);
  expect("sum", 128, 1);
  expect("good", 300, 0);
  // They can be appended to, and the next process finds them right.
  const auto append = [&](const std::string& id, int64_t start, int64_t count) {
    const auto sequence = *second->engine->registry().FindSequence(id);
    EXPECT_TRUE(Append(*second, sequence, 9000, start, count).ok()) << id;
  };
  append("a", 256, 50);
  append("early", 200, 1);
  second.reset();
  second = Open();
  const RestoreReport again = *Restore(*second);
  EXPECT_TRUE(again.lost.empty());
  EXPECT_TRUE(again.damaged.empty());
  second->device.ReleaseAll();
  expect("a", 306, 1);
  expect("early", 201, 1);
  expect("fork", 256, 1);
}

// Sums are right after all kinds of changes: appends of all sizes, cuts, forks, failed appends.
TEST_F(RestoreTest, ChecksumsFollowWhatHappens) {
  std::mt19937 random(3);
  std::vector<int64_t> lengths;
  {
    auto process = Start();
    NewModel(*process);
    std::vector<std::shared_ptr<Sequence>> sequences = {NewSequence(*process, "s0")};
    lengths.push_back(0);
    for (int i = 0; i < 400; ++i) {
      const size_t at = random() % sequences.size();
      const std::shared_ptr<Sequence>& sequence = sequences[at];
      const float tag = static_cast<float>(random() % 100000);
      const int64_t count = 1 + static_cast<int64_t>(random() % (random() % 4 == 0 ? 300 : 4));
      switch (random() % 6) {
        case 0:
          if (sequences.size() < 12) {
            sequences.push_back(Fork(*process, sequence, absl::StrCat("s", sequences.size())));
            lengths.push_back(lengths[at]);
          }
          break;
        case 1: {
          const int64_t to = std::max<int64_t>(0, lengths[at] - count);
          process->engine->Truncate(sequence, to,
                                    [](const absl::Status& s) { EXPECT_TRUE(s.ok()) << s; });
          lengths[at] = to;
          break;
        }
        case 2:
          process->device.FailAppend(absl::InternalError("no"));
          EXPECT_FALSE(Append(*process, sequence, tag, lengths[at], count).ok());
          break;
        default:
          if (lengths[at] + count > 1000) break;
          EXPECT_TRUE(Append(*process, sequence, tag, lengths[at], count).ok());
          lengths[at] += count;
      }
    }
  }
  auto process = Open();
  const RestoreReport report = *Restore(*process);
  EXPECT_TRUE(report.lost.empty());
  EXPECT_TRUE(report.damaged.empty());
  for (size_t i = 0; i < lengths.size(); ++i) {
    const auto sequence = *process->engine->registry().FindSequence(absl::StrCat("s", i));
    EXPECT_EQ(sequence->snapshot().token_count, lengths[i]);
  }
}

TEST_F(RestoreTest, AModelThatIsDamagedIsLostWithItsSequences) {
  {
    auto first = Start();
    NewModel(*first);
    ASSERT_TRUE(Append(*first, NewSequence(*first, "a"), 1000, 0, 300).ok());
    ChangeRecords("\"softmax_scale\"", "\"softmax_scalf\"");
  }
  auto second = Open();
  const RestoreReport report = *Restore(*second);
  EXPECT_EQ(report.model_count, 0);
  EXPECT_EQ(report.sequence_count, 0);
  ASSERT_EQ(report.lost.size(), 2u);
  EXPECT_THAT(std::string(report.lost[0].message()), HasSubstr("the text that begins here"));
  EXPECT_THAT(std::string(report.lost[1].message()),
              HasSubstr("sequences/a: its model, models/m, is lost"));
  // All memory is free, and so are both ids.
  EXPECT_EQ(second->arena->statistics().used_bytes, 0);
  NewModel(*second);
  NewSequence(*second, "a");
}

TEST_F(RestoreTest, AModelThatThisBuildDoesNotKnowStopsTheStart) {
  {
    auto first = Start();
    RecordFile& records = first->store->records();
    std::string text = R"({"id":"m","spec":{"dtype":"f8"},"policy":{},"create_time_ns":0})";
    (*ModelRecord::Create(&records, text))->List();
  }
  auto second = Open();
  const absl::Status status = Restore(*second).status();
  EXPECT_TRUE(absl::IsFailedPrecondition(status)) << status;
  EXPECT_THAT(std::string(status.message()), HasSubstr("start the build that wrote it to"));
}

// A valid record with an id that no call can name is not restored.
TEST_F(RestoreTest, AnIdThatNobodyCanNameIsNotRestored) {
  {
    auto first = Start();
    const auto model = NewModel(*first);
    for (const char* id : {"Bad", "x/y/z", "a"}) {
      StoredSequence stored{id,   "m", model->policy, absl::InfiniteDuration(), absl::UnixEpoch(),
                            true, ""};
      (*SequenceRecord::Create(&first->store->records(), Describe(stored), 2, 1))->List();
      (*SequenceRecord::Create(&first->store->records(), Describe(stored), 2, 1))->List();
    }
  }
  auto second = Open();
  const RestoreReport report = *Restore(*second);
  EXPECT_EQ(report.sequence_count, 1);
  std::vector<std::string> lost;
  for (const absl::Status& status : report.lost) lost.emplace_back(status.message());
  EXPECT_THAT(lost, ::testing::UnorderedElementsAre("sequences/Bad: \"Bad\" is no id",
                                                    "sequences/Bad: \"Bad\" is no id",
                                                    "sequences/x/y/z: \"x/y/z\" is no id",
                                                    "sequences/x/y/z: \"x/y/z\" is no id",
                                                    "sequences/a: there are two with this id"));
}

TEST_F(RestoreTest, TheSeedOfTheSamplingStaysWithTheStore) {
  const uint64_t first = Start()->engine->sampling_seed();
  EXPECT_EQ(Start()->engine->sampling_seed(), first);
  EXPECT_LT(first, uint64_t{1} << 63);
  const ScratchFolder elsewhere;
  MemoryBudget budget(kLimit);
  const auto other = *Store::Open(elsewhere.path(), &budget);
  ToyDevice device(false);
  EXPECT_NE(Engine(&device, nullptr, &budget, {.store = other.get()}).sampling_seed(), first);
  EXPECT_EQ(
      Engine(&device, nullptr, &budget, {.sampling_seed = 7, .store = other.get()}).sampling_seed(),
      7);
  EXPECT_NE(Engine(&device, nullptr, &budget, {}).sampling_seed(),
            Engine(&device, nullptr, &budget, {}).sampling_seed());
}

TEST_F(RestoreTest, OfAnIdThatIsMadeAgainAfterItsTtlOnlyTheSecondIsKept) {
  {
    auto first = Start();
    NewModel(*first);
    ASSERT_TRUE(Append(*first, NewSequence(*first, "a", absl::Seconds(10)), 1000, 0, 300).ok());
    now += std::chrono::seconds(10);
    // No sweep has removed the first one.
    ASSERT_EQ(first->engine->registry().sequence_count(), 1);
    ASSERT_TRUE(Append(*first, NewSequence(*first, "a"), 5000, 0, 200).ok());
  }
  auto second = Open();
  const RestoreReport report = *Restore(*second);
  ASSERT_TRUE(report.lost.empty()) << report.lost.front();
  EXPECT_EQ(report.sequence_count, 1);
  ASSERT_EQ(report.token_count, 200);
  const Asked asked = Ask(*second, *second->engine->registry().FindSequence("a"));
  second->device.ReleaseAll();
  const JobItem& item = (**asked)->job->items.front();
  ASSERT_TRUE(item.status.ok()) << item.status;
  EXPECT_EQ(item.result.out[0], 200);
  EXPECT_EQ(item.result.lse[0], 5199);
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
