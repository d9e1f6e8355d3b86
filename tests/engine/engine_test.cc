#include "engine/engine.h"

#include <atomic>
#include <chrono>
#include <future>
#include <limits>
#include <memory>
#include <thread>

#include "engine/checks.h"
#include "engine/errors.h"
#include "gmock/gmock.h"
#include "host/device/placed_device.h"
#include "tests/engine/engine_fixture.h"

namespace spillway {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using AppendResult = std::optional<absl::StatusOr<AppendOutcome>>;
using AttendResult = std::optional<absl::StatusOr<AttendOutcome>>;

std::string Metadata(const absl::Status& status, const std::string& wanted) {
  for (const auto& [key, value] : DetailsOf(status).metadata) {
    if (key == wanted) return value;
  }
  return "absent";
}

TEST_F(EngineTest, AppendIsVisibleOnlyWhenDone) {
  const auto sequence = NewSequence("s");
  const std::vector<float> rows = Rows(1, 5, 2);
  AppendResult result;
  engine->Append({sequence, ChunkOf(rows, 0, 5, 0, 2), nullptr}, Into(&result));
  EXPECT_FALSE(result.has_value());
  EXPECT_EQ(sequence->snapshot().token_count, 0);
  device.ReleaseAll();
  ASSERT_TRUE(result->ok());
  EXPECT_THAT((**result).layer_token_counts, ElementsAre(5, 5));
  EXPECT_THAT(sequence->snapshot().layer_token_counts, ElementsAre(5, 5));
  EXPECT_EQ(sequence->work.appended_row_count, 10);
}

TEST_F(EngineTest, TwoLayersOfAChunkAreOnTheDeviceTogether) {
  const auto sequence = NewSequence("s");
  const std::vector<float> rows = Rows(1, 5, 2);
  AppendResult result;
  engine->Append({sequence, ChunkOf(rows, 0, 5, 0, 2), nullptr}, Into(&result));
  ASSERT_EQ(device.waiting_count(), 2u);
  device.Release(1);
  EXPECT_FALSE(result.has_value());
  device.Release();
  ASSERT_TRUE(result->ok());
  // If one layer's append fails, the other's is undone, in either order.
  for (const size_t first : {0u, 1u}) {
    engine->Append({sequence, ChunkOf(rows, 5, 5, 0, 2), nullptr}, Into(&result));
    device.FailAppend(absl::OutOfRangeError("no"));
    device.Release(first);
    device.Release();
    EXPECT_EQ(result->status().code(), absl::StatusCode::kOutOfRange);
    EXPECT_THAT(sequence->snapshot().layer_token_counts, ElementsAre(5, 5));
  }
}

TEST_F(EngineTest, OperationsOnOneSequenceRunInOrder) {
  const auto sequence = NewSequence("s");
  const std::vector<float> rows = Rows(1, 3);
  AppendResult first, second;
  AttendResult attend;
  engine->Append({sequence, ChunkOf(rows, 0, 3), nullptr}, Into(&first));
  engine->Append({sequence, ChunkOf(rows, 3, 3), nullptr}, Into(&second));
  AttendRequest request;
  request.items.push_back(Item(sequence));
  engine->Attend(std::move(request), Into(&attend));
  EXPECT_EQ(device.waiting_count(), 1u);
  device.Release();
  EXPECT_TRUE(first.has_value() && !second.has_value());
  device.Release();
  EXPECT_TRUE(second.has_value() && !attend.has_value());
  device.Release();
  ASSERT_TRUE(attend->ok());
  EXPECT_EQ((**attend).job->items[0].result.out[0], 6);
}

TEST_F(EngineTest, AnotherSequenceOvertakes) {
  const auto slow = NewSequence("slow"), quick = NewSequence("quick");
  const std::vector<float> rows = Rows(1, 2);
  AppendResult slow_result, quick_result;
  engine->Append({slow, ChunkOf(rows, 0, 2), nullptr}, Into(&slow_result));
  engine->Append({quick, ChunkOf(rows, 0, 2), nullptr}, Into(&quick_result));
  ASSERT_EQ(device.waiting_count(), 2u);
  device.Release(1);
  EXPECT_TRUE(quick_result.has_value());
  EXPECT_FALSE(slow_result.has_value());
  device.Release();
  EXPECT_TRUE(slow_result->ok());
}

TEST_F(EngineTest, SeveralSequencesAreOneJobThatWaitsForAll) {
  const auto a = NewSequence("a"), b = NewSequence("b");
  const std::vector<float> rows = Rows(1, 4, 2);
  ASSERT_TRUE(Fill(a, rows, 0, 4).ok());
  ASSERT_TRUE(Fill(b, rows, 0, 4).ok());
  AppendResult append;
  AttendResult ab, ba;
  engine->Append({b, ChunkOf(rows, 4, 1), nullptr}, Into(&append));
  for (auto& [order, result] : {std::pair(std::pair(a, b), &ab), std::pair(std::pair(b, a), &ba)}) {
    AttendRequest request;
    request.items.push_back(Item(order.first));
    request.items.push_back(Item(order.second));
    engine->Attend(std::move(request), Into(result));
  }
  EXPECT_EQ(device.waiting_count(), 1u) << "b is busy, so neither attend may start";
  device.Release();
  EXPECT_EQ(device.waiting_count(), 1u) << "the attends share both sequences";
  device.ReleaseAll();
  ASSERT_TRUE(ab->ok() && ba->ok());
  ASSERT_EQ((**ab).job->items.size(), 2u);
  EXPECT_EQ((**ab).job->items[0].result.out[0], 4);
  EXPECT_EQ((**ab).job->items[1].result.out[0], 5);
}

TEST_F(EngineTest, OneBadItemRefusesTheWholeRequest) {
  const auto full = NewSequence("full"), empty = NewSequence("empty");
  ASSERT_TRUE(Fill(full, Rows(1, 4, 2), 0, 4).ok());
  AttendResult result;
  AttendRequest request;
  request.items.push_back(Item(full));
  request.items.push_back(Item(empty));
  engine->Attend(std::move(request), Into(&result));
  EXPECT_EQ(device.waiting_count(), 0u);
  EXPECT_TRUE(absl::IsOutOfRange(result->status()));
  EXPECT_THAT(std::string(result->status().message()), HasSubstr("items[1]"));
}

TEST_F(EngineTest, AppendAgainIsAcceptedOnceTheBytesAreTheSame) {
  const auto sequence = NewSequence("s");
  const std::vector<float> rows = Rows(1, 5, 2), other = Rows(2, 5, 2);
  ASSERT_TRUE(Fill(sequence, rows, 0, 5).ok());
  AppendResult again;
  engine->Append({sequence, ChunkOf(rows, 0, 5, 0, 2), nullptr}, Into(&again));
  ASSERT_TRUE(again->ok());
  EXPECT_TRUE((**again).already_present);
  EXPECT_TRUE(absl::IsAlreadyExists(Fill(sequence, other, 0, 5)));
  const absl::Status gap = Fill(sequence, rows, 7, 5), straddle = Fill(sequence, rows, 3, 5);
  EXPECT_TRUE(absl::IsOutOfRange(gap));
  EXPECT_EQ(Metadata(gap, "layer_token_count"), "5");
  EXPECT_TRUE(absl::IsOutOfRange(straddle));
  EXPECT_TRUE(absl::IsOutOfRange(Fill(sequence, rows, std::numeric_limits<int64_t>::max() - 2, 5)));
  EXPECT_EQ(sequence->snapshot().token_count, 5);
}

TEST_F(EngineTest, TruncateBumpsTheGenerationAndDropsTheNewest) {
  const auto sequence = NewSequence("s");
  const std::vector<float> rows = Rows(1, 5, 2);
  ASSERT_TRUE(Fill(sequence, rows, 0, 5).ok());
  absl::Status status;
  engine->Truncate(sequence, 6, [&](absl::Status s) { status = s; });
  EXPECT_TRUE(absl::IsOutOfRange(status));
  EXPECT_EQ(sequence->snapshot().generation, 0);
  engine->Truncate(sequence, 2, [&](absl::Status s) { status = s; });
  EXPECT_TRUE(status.ok());
  EXPECT_EQ(sequence->snapshot().token_count, 2);
  const absl::Status stale = Fill(sequence, rows, 2, 3);
  EXPECT_TRUE(absl::IsAborted(stale));
  EXPECT_EQ(Metadata(stale, "generation"), "1");
  EXPECT_TRUE(Fill(sequence, rows, 2, 3, 1).ok());
}

TEST_F(EngineTest, ForkCopiesToTheShortestLayerAndThenDiffers) {
  const auto source = NewSequence("s");
  const std::vector<float> rows = Rows(1, 5, 2), more = Rows(50, 1), other = Rows(90, 1);
  ASSERT_TRUE(Fill(source, rows, 0, 5).ok());
  AppendResult longer;
  engine->Append({source, ChunkOf(more, 5, 1, 0, 1), nullptr}, Into(&longer));
  device.ReleaseAll();
  std::optional<absl::StatusOr<std::shared_ptr<Sequence>>> fork;
  engine->Fork(source, "f", Into(&fork));
  ASSERT_TRUE(fork->ok());
  EXPECT_THAT((**fork)->snapshot().layer_token_counts, ElementsAre(5, 5));
  AppendResult write;
  engine->Append({**fork, ChunkOf(other, 5, 1, 0, 1), nullptr}, Into(&write));
  device.ReleaseAll();
  ASSERT_TRUE(write->ok());
  for (const auto& [sequence, last] : {std::pair(source, 50.0f), std::pair(**fork, 90.0f)}) {
    AttendResult attend;
    AttendRequest request;
    request.items.push_back(Item(sequence));
    engine->Attend(std::move(request), Into(&attend));
    device.ReleaseAll();
    ASSERT_TRUE(attend->ok());
    EXPECT_EQ((**attend).job->items[0].result.lse[0], last);
  }
  engine->Fork(source, "f", Into(&fork));
  EXPECT_TRUE(absl::IsAlreadyExists(fork->status()));
}

TEST_F(EngineTest, DeleteFinishesWhatRunsAndThenFrees) {
  const auto sequence = NewSequence("s");
  const std::vector<float> rows = Rows(1, 5);
  AppendResult running, behind;
  bool deleted = false;
  engine->Append({sequence, ChunkOf(rows, 0, 5), nullptr}, Into(&running));
  engine->Delete("s", [&](const absl::Status& status) { deleted = status.ok(); });
  engine->Append({sequence, ChunkOf(rows, 5, 5), nullptr}, Into(&behind));
  EXPECT_FALSE(deleted);
  EXPECT_TRUE(absl::IsNotFound(engine->registry().FindSequence("s").status()));
  device.Release();
  EXPECT_TRUE(running->ok());
  EXPECT_TRUE(deleted);
  EXPECT_EQ(DetailsOf(behind->status()).reason, "SEQUENCE_NOT_FOUND");
  EXPECT_EQ(model->row_pool.used_page_count(), 0);
  absl::Status again;
  engine->Delete("s", [&](const absl::Status& status) { again = status; });
  EXPECT_TRUE(absl::IsNotFound(again));
}

TEST_F(EngineTest, RefusedAppendLeavesNoTrace) {
  const auto sequence = NewSequence("s");
  const int64_t pages = model->row_pool.used_page_count();
  const int64_t slabs = arena->statistics().used_bytes;
  const std::vector<float> rows = Rows(1, 5, 2);
  device.FailPrepare(MemoryExhausted("codes", 7, 3));
  const absl::Status status = Fill(sequence, rows, 0, 5);
  EXPECT_TRUE(absl::IsResourceExhausted(status));
  EXPECT_EQ(Metadata(status, "needed_bytes"), "7");
  EXPECT_EQ(Metadata(status, "free_bytes"), "3");
  EXPECT_EQ(model->row_pool.used_page_count(), pages);
  EXPECT_EQ(arena->statistics().used_bytes, slabs);
  EXPECT_EQ(sequence->snapshot().row_bytes, 0);
  EXPECT_TRUE(Fill(sequence, rows, 0, 5).ok());
}

TEST_F(EngineTest, RefusedStepGivesBackWhatItMadeForItsOtherSequences) {
  const auto first = NewSequence("first"), second = NewSequence("second");
  const std::vector<float> rows = Rows(1, 3);
  const auto step = [&](AttendResult& result) {
    AttendRequest request;
    for (const auto& sequence : {first, second}) {
      request.items.push_back(Item(sequence));
      request.items.back().append = ChunkOf(rows, 0, 3);
    }
    engine->Attend(std::move(request), Into(&result));
  };
  AttendResult refused;
  device.FailPrepare(MemoryExhausted("codes", 7, 3), 1);
  step(refused);
  EXPECT_THAT(std::string(refused->status().message()), HasSubstr("items[1]: "));
  EXPECT_EQ(model->row_pool.used_page_count(), 0);
  EXPECT_EQ(ToyDevice::RoomOf(*first->device), 0);
  AttendResult taken;
  step(taken);
  EXPECT_EQ(model->row_pool.used_page_count(), 2) << "one for each sequence";
  EXPECT_EQ(ToyDevice::RoomOf(*first->device), 3);
  device.ReleaseAll();
  EXPECT_TRUE(taken->ok());
}

// A chunk commits in all of its layers or in none.
TEST_F(EngineTest, AppendThatFailsAtALaterLayerLeavesNoTrace) {
  const auto sequence = NewSequence("s");
  const std::vector<float> old = Rows(1, 4, 2), rows = Rows(50, 200, 2), other = Rows(90, 200, 2);
  ASSERT_TRUE(Fill(sequence, old, 0, 4).ok());
  const int64_t pages = model->row_pool.used_page_count();
  const int64_t row_bytes = sequence->snapshot().row_bytes;
  AppendResult result;
  engine->Append({sequence, ChunkOf(rows, 4, 200, 0, 2), nullptr}, Into(&result));
  device.Release();
  ASSERT_FALSE(result.has_value()) << "the second layer was not awaited";
  device.FailAppend(absl::InternalError("of the second layer"));
  device.Release();
  EXPECT_EQ(result->status().message(), "of the second layer");
  EXPECT_THAT(sequence->snapshot().layer_token_counts, ElementsAre(4, 4));
  EXPECT_EQ(sequence->snapshot().row_bytes, row_bytes);
  EXPECT_EQ(model->row_pool.used_page_count(), pages);
  EXPECT_EQ(sequence->work.appended_row_count, 8);
  // Other rows can be appended at the same positions.
  ASSERT_TRUE(Fill(sequence, other, 4, 200).ok());
  EXPECT_THAT(sequence->snapshot().layer_token_counts, ElementsAre(204, 204));
  for (int layer = 0; layer < 2; ++layer) {
    std::optional<absl::StatusOr<SharedRows>> shared;
    engine->ShareRows(sequence, layer, Into(&shared));
    float k[2];
    std::memcpy(&k[0], (**shared).rows.Row(0, 3), sizeof(float));
    std::memcpy(&k[1], (**shared).rows.Row(0, 4), sizeof(float));
    EXPECT_THAT(k, ElementsAre(4, 90)) << "layer " << layer;
  }
}

TEST_F(EngineTest, FailedAttendUndoesItsAppend) {
  const auto sequence = NewSequence("s");
  const std::vector<float> rows = Rows(1, 1), other = Rows(9, 1);
  ASSERT_TRUE(Fill(sequence, Rows(1, 4, 2), 0, 4).ok());
  for (const bool fail : {true, false}) {
    if (fail) device.FailAttend(absl::OutOfRangeError("a logit is not finite"));
    AttendResult result;
    AttendRequest request;
    request.items.push_back(Item(sequence));
    request.items[0].append = ChunkOf(fail ? rows : other, 4, 1);
    engine->Attend(std::move(request), Into(&result));
    device.ReleaseAll();
    ASSERT_TRUE(result->ok());
    EXPECT_EQ((**result).job->items[0].status.ok(), !fail);
    EXPECT_THAT(sequence->snapshot().layer_token_counts, ElementsAre(fail ? 4 : 5, 4));
    if (!fail) {
      EXPECT_EQ((**result).job->items[0].result.lse[0], 9) << "the first append's row";
    }
  }
  EXPECT_EQ(sequence->work.attend_count, 1);
}

TEST_F(EngineTest, CancellationAndDeadlineReachQueuedAndRunningWork) {
  const auto sequence = NewSequence("s");
  ASSERT_TRUE(Fill(sequence, Rows(1, 4, 2), 0, 4).ok());
  const auto running = std::make_shared<CancelToken>();
  const auto queued = std::make_shared<CancelToken>(CancelToken::Clock::now());
  AttendResult first, second;
  for (auto& [token, result] : {std::pair(running, &first), std::pair(queued, &second)}) {
    AttendRequest request;
    request.items.push_back(Item(sequence));
    request.cancel = token;
    engine->Attend(std::move(request), Into(result));
  }
  running->Cancel();
  device.ReleaseAll();
  ASSERT_TRUE(first->ok());
  EXPECT_TRUE(absl::IsCancelled((**first).job->items[0].status));
  EXPECT_TRUE(absl::IsDeadlineExceeded(second->status()));
}

TEST_F(EngineTest, IdleSequencesExpireAndUseRenews) {
  NewSequence("used", absl::Seconds(10));
  NewSequence("idle", absl::Seconds(10));
  const auto busy = NewSequence("busy", absl::Seconds(10));
  const auto used = engine->registry().FindSequence("used");
  ASSERT_TRUE(Fill(*used, Rows(1, 4, 2), 0, 4).ok());
  const std::vector<float> rows = Rows(1, 2);
  AppendResult running;
  engine->Append({busy, ChunkOf(rows, 0, 2), nullptr}, Into(&running));
  now += std::chrono::seconds(6);
  EXPECT_TRUE(engine->registry().UseSequence("used", nullptr).ok());
  now += std::chrono::seconds(6);
  EXPECT_TRUE(absl::IsNotFound(engine->registry().FindSequence("idle").status()));
  EXPECT_TRUE(engine->registry().FindSequence("busy").ok());
  EXPECT_TRUE(absl::IsAlreadyExists(
      engine->CreateSequence("busy", model, model->policy, absl::Seconds(10)).status()));
  const std::vector<ExpiredSequence> expired = engine->SweepExpired();
  ASSERT_EQ(expired.size(), 1u);
  EXPECT_EQ(expired[0].name, "sequences/idle");
  EXPECT_EQ(expired[0].model_name, "models/m");
  EXPECT_EQ(expired[0].token_count, 0);
  EXPECT_EQ(expired[0].idle, absl::Seconds(12));
  EXPECT_EQ(engine->registry().sequence_count(), 2) << "one is used, one is busy";
  device.ReleaseAll();
  EXPECT_TRUE(engine->registry().FindSequence("busy").ok());
  now += std::chrono::seconds(11);
  EXPECT_EQ(engine->SweepExpired().size(), 2u);
  EXPECT_EQ(engine->registry().sequence_count(), 0);
  EXPECT_EQ(model->row_pool.used_page_count(), 0);
}

// As a snapshot that takes longer to load than its sequence may be idle.
TEST_F(EngineTest, TheTtlBeginsWhenASequenceIsListed) {
  const auto sequence =
      *engine->MakeSequence("slow", model, model->policy, absl::Seconds(10), Origin{true, nullptr});
  ASSERT_TRUE(Fill(sequence, Rows(1, 4, 2), 0, 4).ok());
  now += std::chrono::seconds(30);
  ASSERT_TRUE(engine->ListSequence(sequence).ok());
  now += std::chrono::seconds(9);
  EXPECT_TRUE(engine->SweepExpired().empty());
  EXPECT_TRUE(engine->registry().FindSequence("slow").ok());
  now += std::chrono::seconds(1);
  EXPECT_EQ(engine->SweepExpired().size(), 1u);
}

// A test that fails may return so. It must end, and not wait for ever.
TEST_F(EngineTest, EndsWhileTheDeviceHasWork) {
  const auto sequence = NewSequence("s");
  const std::vector<float> rows = Rows(1, 5, 2);
  AppendResult running;
  AttendResult behind;
  engine->Append({sequence, ChunkOf(rows, 0, 5, 0, 2), nullptr}, Into(&running));
  AttendRequest request;
  request.items.push_back(Item(sequence));
  engine->Attend(std::move(request), Into(&behind));
  EXPECT_EQ(device.waiting_count(), 2u) << "both layers of the chunk";
}

TEST(RunStepTest, AnExceptionStopsNoOtherStep) {
  std::vector<int> ran;
  EXPECT_THROW(RunStep([&] {
                 RunStep([&] { ran.push_back(1); });
                 throw std::bad_alloc();
               }),
               std::bad_alloc);
  RunStep([&] { ran.push_back(2); });
  EXPECT_THAT(ran, ::testing::ElementsAre(1, 2));
}

TEST_F(EngineTest, SharedRowsOutliveATruncation) {
  const auto sequence = NewSequence("s");
  ASSERT_TRUE(Fill(sequence, Rows(1, 4, 2), 0, 4).ok());
  std::optional<absl::StatusOr<SharedRows>> shared;
  engine->ShareRows(sequence, 0, Into(&shared));
  engine->Truncate(sequence, 0, [](const absl::Status& status) { EXPECT_TRUE(status.ok()); });
  ASSERT_TRUE(Fill(sequence, Rows(70, 4, 2), 0, 4, 1).ok());
  float k = 0;
  std::memcpy(&k, (**shared).rows.Row(0, 3), sizeof k);
  EXPECT_EQ(k, 4);
}

TEST_F(EngineTest, ModelWithSequencesStays) {
  NewSequence("s");
  const absl::Status status = engine->registry().RemoveModel("m");
  EXPECT_TRUE(absl::IsFailedPrecondition(status));
  EXPECT_EQ(Metadata(status, "sequence_count"), "1");
  engine->Delete("s", [](const absl::Status& deleted) { EXPECT_TRUE(deleted.ok()); });
  EXPECT_TRUE(engine->registry().RemoveModel("m").ok());
}

TEST_F(EngineTest, NonFiniteRowsAreNamed) {
  std::vector<float> rows = Rows(1, 5, 2);
  rows[(5 + 3) * 16 + 7] = std::numeric_limits<float>::quiet_NaN();
  const absl::Status status = CheckFinite(ChunkOf(rows, 100, 5, 0, 2), model->spec, "chunk.");
  EXPECT_EQ(DetailsOf(status).reason, "NON_FINITE");
  EXPECT_THAT(std::string(status.message()), HasSubstr("layer 1, KV head 0, token 103, element 7"));
  // The same rows as a chunk that begins at a later layer.
  const auto later = ChunkSource::Dense(rows.data() + 5 * 16, 1, 5, 16 * sizeof(float));
  EXPECT_THAT(
      std::string(CheckFinite({1, 1, 100, 5, 0, later, later}, model->spec, "chunk.").message()),
      HasSubstr("layer 1, KV head 0, token 103, element 7"));
}

TEST_F(EngineTest, ChunkThatBeginsAtALaterLayerIsOfThatLayer) {
  const auto sequence = NewSequence("s");
  const std::vector<float> rows = Rows(7, 5);
  AppendResult result;
  engine->Append({sequence, ChunkOf(rows, 0, 5, 1), nullptr}, Into(&result));
  ASSERT_EQ(device.waiting_count(), 1u);
  EXPECT_EQ(device.waiting_layer(), 1) << "which the device names in its errors";
  device.ReleaseAll();
  ASSERT_TRUE(result->ok());
  EXPECT_THAT((**result).layer_token_counts, ElementsAre(0, 5));
  float k;
  std::memcpy(&k, sequence->rows[1].Row(0, 4), sizeof(k));
  EXPECT_EQ(k, 11);
}

TEST_F(EngineTest, RefusedAppendNamesItsLayer) {
  const auto sequence = NewSequence("s");
  const std::vector<float> rows = Rows(1, 5), others = Rows(2, 5);
  const auto append = [&](const std::vector<float>& of, int64_t start) {
    AppendResult result;
    engine->Append({sequence, ChunkOf(of, start, 5, 1), nullptr}, Into(&result));
    device.ReleaseAll();
    return result->status();
  };
  ASSERT_TRUE(append(rows, 0).ok());
  EXPECT_THAT(sequence->snapshot().layer_token_counts, ElementsAre(0, 5));
  for (const absl::Status& refused : {append(others, 0), append(rows, 7)}) {
    EXPECT_THAT(std::string(refused.message()), ::testing::StartsWith("layer 1 has "));
    EXPECT_EQ(Metadata(refused, "layer"), "1");
    EXPECT_EQ(Metadata(refused, "layer_token_count"), "5");
  }
}

// Their time on the device is counted once, in equal shares.
TEST_F(EngineTest, ItemsThatRanTogetherShareTheirTime) {
  const auto first = NewSequence("first"), second = NewSequence("second");
  for (const auto& sequence : {first, second}) {
    ASSERT_TRUE(Fill(sequence, Rows(1, 4, 2), 0, 4).ok());
  }
  const auto attend = [&](const std::vector<std::shared_ptr<Sequence>>& sequences) {
    AttendRequest request;
    for (const auto& sequence : sequences) request.items.push_back(Item(sequence));
    AttendResult result;
    engine->Attend(std::move(request), Into(&result));
    device.ReleaseAll();
    EXPECT_TRUE(result->ok());
  };
  device.device_time_us = 600;
  attend({first, second});
  EXPECT_EQ(first->work.attend_time_us, 300);
  EXPECT_EQ(second->work.attend_time_us, 300);
  // The device joined the job of two items with another one.
  device.batch_item_count = 6;
  attend({first, second});
  EXPECT_EQ(first->work.attend_time_us, 400);
  EXPECT_EQ(model->work.attend_time_us, 800);
}

class FullEngineTest : public EngineTest {
 protected:
  // Memory for one slab of rows and some tables.
  FullEngineTest() : EngineTest(false, kSlabBytes + (512 << 10)) {}
};

TEST_F(FullEngineTest, AdmissionRefusesBeforeTheLimit) {
  const auto sequence = NewSequence("s");
  const std::vector<float> rows = Rows(1, 1024, 2);
  int64_t tokens = 0;
  absl::Status status;
  while ((status = Fill(sequence, rows, tokens, 1024)).ok()) {
    tokens += 1024;
    ASSERT_LE(budget.used_bytes(), budget.limit_bytes());
  }
  EXPECT_TRUE(absl::IsResourceExhausted(status)) << status;
  EXPECT_GT(tokens, 0);
  EXPECT_EQ(sequence->snapshot().token_count, tokens);
  const SequenceSnapshot before = sequence->snapshot();
  EXPECT_FALSE(Fill(sequence, rows, tokens, 1024).ok());
  EXPECT_EQ(sequence->snapshot().row_bytes, before.row_bytes);
}

// An engine on two devices, each with its own memory.
class TwoDeviceEngineTest : public EngineTest {
 protected:
  TwoDeviceEngineTest() {
    std::vector<std::unique_ptr<Device>> devices;
    for (int i = 0; i < 2; ++i) {
      auto toy = std::make_unique<ToyDevice>(false);
      toys.push_back(toy.get());
      devices.push_back(std::move(toy));
    }
    SetUsed(0, 0);
    model.reset();
    engine.reset();
    placed = CreatePlacedDevice(std::move(devices));
    engine.emplace(placed.get(), arena.get(), &budget, EngineOptions());
    ModelSpec spec;
    spec.layer_count = 2;
    spec.query_head_count = 1;
    spec.kv_head_count = 1;
    spec.head_dim = 16;
    spec.dtype = DType::kF32;
    spec.hash.kind = HashKind::kNone;
    EXPECT_TRUE(Normalize(spec).empty());
    model = *engine->CreateModel("m", spec, DefaultPolicy(spec));
  }
  // Sequences and models must be destroyed before the device.
  ~TwoDeviceEngineTest() override {
    model.reset();
    engine.reset();
  }
  void TearDown() override {
    EngineTest::TearDown();
    for (ToyDevice* const toy : toys) toy->RefuseAll();
  }
  // Sets the used bytes of the devices. Codes take 10 bytes per token and layer.
  void SetUsed(int64_t first_bytes, int64_t second_bytes) {
    toys[0]->SetMemory({10000, first_bytes}, 10);
    toys[1]->SetMemory({10000, second_bytes}, 10);
  }

  std::vector<ToyDevice*> toys;
  std::unique_ptr<Device> placed;
};

TEST_F(TwoDeviceEngineTest, FreeTokensAreThoseThatOneSequenceCanHave) {
  EXPECT_EQ(engine->FreeTokenCount(*model), 500);
  SetUsed(4000, 8000);
  EXPECT_EQ(engine->FreeTokenCount(*model), 300);
  SetUsed(10000, 10000);
  EXPECT_EQ(engine->FreeTokenCount(*model), 0);
}

TEST_F(TwoDeviceEngineTest, OneRequestAttendsOnBoth) {
  const std::vector<std::shared_ptr<Sequence>> sequences = {NewSequence("a"), NewSequence("b")};
  const std::vector<float> rows = Rows(1, 3);
  AttendResult result;
  AttendRequest request;
  for (const auto& sequence : sequences) {
    request.items.push_back(Item(sequence));
    request.items.back().append = ChunkOf(rows, 0, 3);
  }
  toys[0]->FailAttend(absl::OutOfRangeError("of the first"));
  engine->Attend(std::move(request), Into(&result));
  ASSERT_EQ(toys[0]->waiting_count(), 1u);
  ASSERT_EQ(toys[1]->waiting_count(), 1u);
  toys[1]->Release();
  EXPECT_FALSE(result.has_value());
  toys[0]->Release();
  ASSERT_TRUE(result->ok());
  EXPECT_EQ((**result).job->items[0].status.message(), "of the first");
  EXPECT_EQ((**result).job->items[1].result.out[0], 3);
  EXPECT_EQ(sequences[0]->snapshot().layer_token_counts[0], 0);
  EXPECT_EQ(sequences[1]->snapshot().layer_token_counts[0], 3);
}

class LateEngineTest : public EngineTest {
 protected:
  LateEngineTest() : EngineTest(true) {}
};

// Many sequences with answers at random times: each sees its own appends in order, and they are
// served in parallel.
TEST_F(LateEngineTest, SequencesProgressInParallelEachInOrder) {
  constexpr int kSequences = 8, kSteps = 25;
  const std::vector<float> rows = Rows(1, 1);
  std::vector<std::shared_ptr<Sequence>> sequences;
  std::vector<std::vector<float>> seen(kSequences);
  std::atomic<int> done{0};
  for (int s = 0; s < kSequences; ++s) sequences.push_back(NewSequence("s" + std::to_string(s)));
  for (int step = 0; step < kSteps; ++step) {
    for (int s = 0; s < kSequences; ++s) {
      AttendRequest request;
      request.items.push_back(Item(sequences[s]));
      request.items[0].append = ChunkOf(rows, step, 1);
      engine->Attend(std::move(request), [&, s](absl::StatusOr<AttendOutcome> outcome) {
        ASSERT_TRUE(outcome.ok()) << outcome.status();
        ASSERT_TRUE(outcome->job->items[0].status.ok()) << outcome->job->items[0].status;
        seen[s].push_back(outcome->job->items[0].result.out[0]);
        ++done;
      });
    }
  }
  while (done < kSequences * kSteps) std::this_thread::sleep_for(std::chrono::milliseconds(1));
  device.Join();
  for (const std::vector<float>& lengths : seen) {
    for (int step = 0; step < kSteps; ++step) EXPECT_EQ(lengths[step], step + 1);
  }
  EXPECT_GT(device.running_count_max(), 1);
}

// A client that has its answer may close the engine in its process at once, while the device's
// thread is still releasing what the operation held.
TEST_F(EngineTest, GoesAfterWhatItHasAnswered) {
  struct Slow {
    explicit Slow(std::atomic<bool>* gone) : gone(gone) {}
    ~Slow() {
      std::this_thread::sleep_for(std::chrono::milliseconds(50));
      *gone = true;
    }
    std::atomic<bool>* const gone;
  };
  const std::vector<float> rows = Rows(1, 5, 2);
  std::atomic<bool> gone = false;
  std::promise<bool> answered;
  engine->Append({NewSequence("s"), ChunkOf(rows, 0, 5, 0, 2), nullptr},
                 [held = std::make_shared<Slow>(&gone), &answered](const auto& outcome) {
                   answered.set_value(outcome.ok());
                 });
  std::thread serving([this] { device.ReleaseAll(); });
  EXPECT_TRUE(answered.get_future().get());
  model.reset();
  engine.reset();
  EXPECT_TRUE(gone);
  serving.join();
}

}  // namespace
}  // namespace spillway
