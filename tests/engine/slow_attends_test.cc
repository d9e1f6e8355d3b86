// Slow attends are recorded, with the times of their stages.
#include "engine/slow_attends.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tests/engine/engine_fixture.h"

namespace spillway {
namespace {

using ::testing::IsEmpty;

class SlowAttendsTest : public EngineTest {
 protected:
  SlowAttendsTest() {
    for (const char* id : {"a", "b"}) sequences.push_back(NewSequence(id));
    EXPECT_TRUE(Fill(sequences[0], Rows(0, 40, 2), 0, 40).ok());
    EXPECT_TRUE(Fill(sequences[1], Rows(0, 70, 2), 0, 70).ok());
  }
  // Attends with one query per sequence, in one request.
  void Attend(const std::vector<std::shared_ptr<Sequence>>& of, bool select_only = false) {
    AttendRequest request;
    request.trace = "0af7";
    request.layer = 1;
    request.select_only = select_only;
    for (const auto& sequence : of) request.items.push_back(Item(sequence));
    std::optional<absl::StatusOr<AttendOutcome>> result;
    engine->Attend(std::move(request), Into(&result));
    device.ReleaseAll();
    ASSERT_TRUE(result->ok());
  }

  std::vector<std::shared_ptr<Sequence>> sequences;
};

TEST_F(SlowAttendsTest, NoneIsSlowUntilThereIsALimit) {
  Attend(sequences);
  EXPECT_THAT(engine->slow_attends().Take().steps.attends, IsEmpty());
  engine->slow_attends().SetSeconds(3600);
  Attend(sequences);
  EXPECT_THAT(engine->slow_attends().Take().steps.attends, IsEmpty());
}

TEST_F(SlowAttendsTest, TheLongestSequenceIsNamed) {
  engine->slow_attends().SetSeconds(1e-12);
  device.stages = {{"score", 5}};
  device.queue_time_us = 250;
  Attend(sequences);
  const SlowAttends::Taken taken = engine->slow_attends().Take();
  EXPECT_THAT(taken.others.attends, IsEmpty());
  ASSERT_EQ(taken.steps.attends.size(), 1);
  const SlowAttend& slow = taken.steps.attends[0];
  EXPECT_EQ(slow.sequence, "sequences/b");
  EXPECT_EQ(slow.sequence_count, 2);
  EXPECT_EQ(slow.model, "models/m");
  EXPECT_EQ(slow.layer, 1);
  EXPECT_EQ(slow.trace, "0af7");
  EXPECT_EQ(slow.token_count, 70);
  EXPECT_EQ(slow.query_count, 1);
  EXPECT_EQ(slow.queue_seconds, 250e-6);
  EXPECT_GT(slow.seconds, slow.wait_seconds);
  ASSERT_EQ(slow.stages.size(), 1);
  EXPECT_EQ(slow.stages[0].name, "score");
}

TEST_F(SlowAttendsTest, OfManyAFewAreKeptAndStepsApart) {
  engine->slow_attends().SetSeconds(1e-12);
  for (int i = 0; i < 12; ++i) Attend({sequences[0]}, /*select_only=*/true);
  Attend({sequences[0]});
  const SlowAttends::Taken taken = engine->slow_attends().Take();
  EXPECT_EQ(taken.others.attends.size(), 5);
  EXPECT_EQ(taken.others.more_count, 7);
  EXPECT_EQ(taken.steps.attends.size(), 1);
  EXPECT_EQ(taken.steps.more_count, 0);
  EXPECT_THAT(engine->slow_attends().Take().others.attends, IsEmpty());
}

}  // namespace
}  // namespace spillway
