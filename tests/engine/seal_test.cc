#include <functional>
#include <optional>
#include <string>

#include "engine/engine.h"
#include "engine/errors.h"
#include "engine/stream_decoder.h"
#include "gmock/gmock.h"
#include "tests/engine/engine_fixture.h"

namespace spillway {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using AppendResult = std::optional<absl::StatusOr<AppendOutcome>>;
using AttendResult = std::optional<absl::StatusOr<AttendOutcome>>;
using Status = std::optional<absl::Status>;

std::function<void(absl::Status)> Told(Status* status) {
  return [status](absl::Status is) { *status = std::move(is); };
}

void ExpectRefused(const absl::Status& status, const std::string& reason,
                   const std::string& name = "sequences/s") {
  EXPECT_EQ(status.code(), absl::StatusCode::kFailedPrecondition) << status;
  const ErrorDetails details = DetailsOf(status);
  EXPECT_EQ(details.reason, reason);
  EXPECT_THAT(details.metadata, ElementsAre(std::pair<std::string, std::string>("name", name)));
}

class SealTest : public EngineTest {
 protected:
  absl::Status Seal(const std::shared_ptr<Sequence>& sequence, bool sealed = true) {
    Status status;
    engine->Seal(sequence, sealed, Told(&status));
    EXPECT_TRUE(status.has_value());
    return status.value_or(absl::UnknownError("not answered"));
  }
  // A sequence with `count` tokens in both layers.
  std::shared_ptr<Sequence> Filled(const std::string& id, int64_t count) {
    auto sequence = NewSequence(id);
    EXPECT_TRUE(Fill(sequence, Rows(1, count, 2), 0, count).ok());
    return sequence;
  }
  // Attends at layer 0, after appending each item's chunk if it has one.
  absl::Status Attend(std::vector<AttendItem> items) {
    AttendRequest request;
    request.items = std::move(items);
    AttendResult result;
    engine->Attend(std::move(request), Into(&result));
    device.ReleaseAll();
    if (!result->ok()) return result->status();
    return (**result).job->items.front().status;
  }
  AttendItem StepOf(const std::shared_ptr<Sequence>& sequence, const Chunk& chunk) {
    AttendItem item = Item(sequence);
    item.append = chunk;
    return item;
  }
};

TEST_F(SealTest, WaitsForTheAppendUnderWayAndStopsTheNext) {
  const auto sequence = NewSequence("s");
  const std::vector<float> rows = Rows(1, 5, 2);
  AppendResult before, after;
  Status sealed;
  engine->Append({sequence, ChunkOf(rows, 0, 5, 0, 2), nullptr}, Into(&before));
  engine->Seal(sequence, true, Told(&sealed));
  engine->Append({sequence, ChunkOf(rows, 5, 5, 0, 2), nullptr}, Into(&after));
  device.Release();
  EXPECT_FALSE(before.has_value() || sealed.has_value() || after.has_value());
  EXPECT_FALSE(sequence->snapshot().sealed);
  device.Release();
  ASSERT_TRUE(before.has_value() && sealed.has_value() && after.has_value());
  EXPECT_TRUE(before->ok());
  EXPECT_TRUE(sealed->ok());
  ExpectRefused(after->status(), "SEQUENCE_SEALED");
  EXPECT_EQ(device.waiting_count(), 0u);
  EXPECT_TRUE(sequence->snapshot().sealed);
  EXPECT_THAT(sequence->snapshot().layer_token_counts, ElementsAre(5, 5));
}

TEST_F(SealTest, AStepInTheMiddleOfItsLayersStaysAsItIs) {
  const auto sequence = Filled("s", 5);
  const std::vector<float> row = Rows(7, 1);
  ASSERT_TRUE(Attend({StepOf(sequence, ChunkOf(row, 5, 1))}).ok());
  ASSERT_TRUE(Seal(sequence).ok());
  AppendResult second;
  engine->Append({sequence, ChunkOf(row, 5, 1, 1), nullptr}, Into(&second));
  ExpectRefused(second->status(), "SEQUENCE_SEALED");
  EXPECT_THAT(sequence->snapshot().layer_token_counts, ElementsAre(6, 5));
  EXPECT_EQ(sequence->snapshot().generation, 0);
  ASSERT_TRUE(Seal(sequence, false).ok());
  EXPECT_FALSE(sequence->snapshot().sealed);
  engine->Append({sequence, ChunkOf(row, 5, 1, 1), nullptr}, Into(&second));
  device.ReleaseAll();
  EXPECT_TRUE(second->ok());
  EXPECT_THAT(sequence->snapshot().layer_token_counts, ElementsAre(6, 6));
}

TEST_F(SealTest, WhateverAppendsOrTruncatesIsRefused) {
  const auto sequence = Filled("s", 5), open = Filled("open", 5);
  const std::vector<float> rows = Rows(1, 5, 2), row = Rows(7, 1);
  ASSERT_TRUE(Seal(sequence).ok());
  EXPECT_TRUE(Seal(sequence).ok()) << "a second time";
  ExpectRefused(Fill(sequence, rows, 5, 5), "SEQUENCE_SEALED");
  ExpectRefused(Fill(sequence, rows, 0, 5), "SEQUENCE_SEALED");  // equal bytes
  ExpectRefused(Attend({StepOf(sequence, ChunkOf(row, 5, 1))}), "SEQUENCE_SEALED");
  ExpectRefused(Attend({StepOf(sequence, ChunkOf(rows, 0, 1))}), "SEQUENCE_SEALED");
  // The other sequence of the step gets no token either.
  const absl::Status together =
      Attend({StepOf(open, ChunkOf(row, 5, 1)), StepOf(sequence, ChunkOf(row, 5, 1))});
  ExpectRefused(together, "SEQUENCE_SEALED");
  EXPECT_THAT(std::string(together.message()), HasSubstr("items[1]: sequences/s is sealed"));
  EXPECT_THAT(open->snapshot().layer_token_counts, ElementsAre(5, 5));
  Status cut;
  engine->Truncate(sequence, 2, Told(&cut));
  ExpectRefused(*cut, "SEQUENCE_SEALED");
  ExpectRefused(StreamDecoder::Create(&*engine, {{sequence, 5, 0, model->policy}}, 1, 100).status(),
                "SEQUENCE_SEALED");
  EXPECT_FALSE(sequence->held);
  EXPECT_THAT(sequence->snapshot().layer_token_counts, ElementsAre(5, 5));
  EXPECT_EQ(sequence->snapshot().generation, 0);
  EXPECT_TRUE(Seal(sequence, false).ok());
  EXPECT_TRUE(Seal(sequence, false).ok()) << "a second time";
  EXPECT_TRUE(Fill(sequence, rows, 5, 5).ok());
}

TEST_F(SealTest, WhatReadsGoesOn) {
  const auto sequence = Filled("s", 5);
  ASSERT_TRUE(Seal(sequence).ok());
  EXPECT_TRUE(Attend({Item(sequence)}).ok());
  std::optional<absl::StatusOr<SharedRows>> rows;
  engine->ShareRows(sequence, 1, Into(&rows));
  ASSERT_TRUE(rows->ok());
  EXPECT_EQ((**rows).rows.token_count(), 5);
  std::optional<absl::StatusOr<SharedSequence>> whole;
  engine->ShareSequence(sequence, Into(&whole));
  ASSERT_TRUE(whole->ok());
  EXPECT_EQ((**whole).token_count, 5);
  std::optional<absl::StatusOr<std::shared_ptr<Sequence>>> fork;
  engine->Fork(sequence, "fork", Into(&fork));
  ASSERT_TRUE(fork->ok());
  EXPECT_FALSE((**fork)->snapshot().sealed);
  EXPECT_TRUE(Fill(**fork, Rows(9, 1, 2), 5, 1).ok());
  Status deleted;
  engine->Delete("s", Told(&deleted));
  EXPECT_TRUE(deleted->ok());
}

TEST_F(SealTest, OnlyASealedOneIsDeleted) {
  const auto sequence = Filled("s", 5);
  Status deleted, opened;
  engine->DeleteSealed("s", Told(&deleted));
  ExpectRefused(*deleted, "SEQUENCE_NOT_SEALED");
  ASSERT_TRUE(Seal(sequence).ok());
  // The sequence is opened again before the deletion's turn.
  AttendResult attend;
  AttendRequest request;
  request.items.push_back(Item(sequence));
  engine->Attend(std::move(request), Into(&attend));
  engine->Seal(sequence, false, Told(&opened));
  engine->DeleteSealed("s", Told(&deleted));
  device.ReleaseAll();
  EXPECT_TRUE(opened->ok());
  ExpectRefused(*deleted, "SEQUENCE_NOT_SEALED");
  EXPECT_TRUE(engine->registry().FindSequence("s").ok());
  EXPECT_TRUE(Fill(sequence, Rows(9, 1, 2), 5, 1).ok());
  ASSERT_TRUE(Seal(sequence).ok());
  engine->DeleteSealed("s", Told(&deleted));
  EXPECT_TRUE(deleted->ok());
  EXPECT_TRUE(sequence->deleted());
  EXPECT_EQ(engine->registry().sequence_count(), 0);
  engine->DeleteSealed("s", Told(&deleted));
  EXPECT_TRUE(absl::IsNotFound(*deleted));
  EXPECT_EQ(DetailsOf(*deleted).reason, "SEQUENCE_NOT_FOUND");
  Status sealed;
  engine->Seal(sequence, true, Told(&sealed));
  EXPECT_TRUE(absl::IsNotFound(*sealed));
}

TEST_F(SealTest, DeletingItLeavesAnotherOfItsName) {
  const auto sequence = Filled("s", 5);
  ASSERT_TRUE(Seal(sequence).ok());
  AttendResult attend;
  AttendRequest request;
  request.items.push_back(Item(sequence));
  engine->Attend(std::move(request), Into(&attend));
  Status if_sealed, deleted;
  engine->DeleteSealed("s", Told(&if_sealed));
  engine->Delete("s", Told(&deleted));
  const auto other = NewSequence("s");
  device.ReleaseAll();
  EXPECT_TRUE(absl::IsNotFound(*if_sealed));
  EXPECT_TRUE(deleted->ok());
  EXPECT_TRUE(sequence->deleted());
  EXPECT_EQ(*engine->registry().FindSequence("s"), other);
  EXPECT_TRUE(Fill(other, Rows(1, 1, 2), 0, 1).ok());
}

}  // namespace
}  // namespace spillway
