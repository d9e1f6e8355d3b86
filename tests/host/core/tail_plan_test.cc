#include "host/core/tail_plan.h"

#include <gtest/gtest.h>

#include <cstdint>
#include <limits>

namespace spillway {
namespace {

constexpr int64_t kUnlimited = std::numeric_limits<int64_t>::max();

TEST(TailRowsLeft, IsWhatTheExactRowsDoNotTake) {
  EXPECT_EQ(TailRowsLeft(0, 64, 64, 256), kUnlimited);
  EXPECT_EQ(TailRowsLeft(1000, 64, 32, 256), 648);
  EXPECT_EQ(TailRowsLeft(352, 64, 32, 256), 0);
  EXPECT_EQ(TailRowsLeft(300, 64, 32, 256), 0);
}

TEST(StratumEdge, DoublesTheRank) {
  EXPECT_EQ(StratumEdge(256, 0), 256);
  EXPECT_EQ(StratumEdge(256, 1), 768);
  EXPECT_EQ(StratumEdge(1, 30), (int64_t{1} << 31) - 1);
  // No overflow at the largest heavy set.
  const int64_t most = std::numeric_limits<int32_t>::max();
  EXPECT_EQ(StratumEdge(most, 30), most * ((int64_t{1} << 31) - 1));
}

TEST(StrataFit, SixteenRowsEach) {
  EXPECT_TRUE(StrataFit(5, 80));
  EXPECT_FALSE(StrataFit(5, 79));
  EXPECT_TRUE(StrataFit(32, kUnlimited));
}

TEST(HeavySet, StraysStandBesideWhatIsWanted) {
  const HeavySet set = HeavySet::Of(256, /*adaptive=*/false, 7, 0, 64, 64);
  EXPECT_EQ(set.ranked, 256);
  EXPECT_EQ(set.strays, 7);
  EXPECT_TRUE(set.strays_fit);
  EXPECT_EQ(set.count(), 263);
  EXPECT_EQ(HeavySet::Of(0, false, 7, 0, 64, 64).count(), 7);
  EXPECT_EQ(HeavySet::Of(1024, true, 0, 0, 64, 64).count(), 1024);
}

TEST(HeavySet, MoreThan1024StraysAreNotAllRead) {
  EXPECT_EQ(HeavySet::Of(64, true, 1024, 0, 64, 64).strays, 1024);
  EXPECT_TRUE(HeavySet::Of(64, true, 1024, 0, 64, 64).strays_fit);
  const HeavySet set = HeavySet::Of(64, true, 1025, 0, 64, 64);
  EXPECT_EQ(set.strays, 1024);
  EXPECT_EQ(set.ranked, 64);
  EXPECT_FALSE(set.strays_fit);
}

// 500 rows, of which 128 are sink and window: 372 are left.
TEST(HeavySet, ALimitIsForStraysFirst) {
  const HeavySet all = HeavySet::Of(256, false, 100, 500, 64, 64);
  EXPECT_EQ(all.strays, 100);
  EXPECT_EQ(all.ranked, 256);
  const HeavySet fewer = HeavySet::Of(256, false, 200, 500, 64, 64);
  EXPECT_EQ(fewer.strays, 200);
  EXPECT_EQ(fewer.ranked, 172);
  EXPECT_TRUE(fewer.strays_fit);
  const HeavySet none = HeavySet::Of(256, false, 400, 500, 64, 64);
  EXPECT_EQ(none.strays, 372);
  EXPECT_EQ(none.ranked, 0);
  EXPECT_FALSE(none.strays_fit);
  EXPECT_EQ(HeavySet::Of(256, false, 5, 128, 64, 64).count(), 0);
  EXPECT_EQ(HeavySet::Of(256, false, 0, 100, 64, 64).count(), 0);
}

// Half of what is left after the strays; but not less than the smallest count that an error asks
// for, while there is room, and not more than what is wanted.
TEST(HeavySet, AnAdaptiveCountLeavesHalfToTheTail) {
  EXPECT_EQ(HeavySet::Of(512, true, 0, 1152, 64, 64).ranked, 512);
  EXPECT_EQ(HeavySet::Of(512, true, 0, 1150, 64, 64).ranked, 511);
  EXPECT_EQ(HeavySet::Of(512, true, 100, 1152, 64, 64).ranked, 462);
  EXPECT_EQ(HeavySet::Of(1024, true, 0, 228, 64, 64).ranked, 64);
  EXPECT_EQ(HeavySet::Of(1024, true, 0, 188, 64, 64).ranked, 60);
  EXPECT_EQ(HeavySet::Of(64, true, 0, 228, 64, 64).ranked, 64);
  EXPECT_EQ(HeavySet::Of(20, true, 0, 158, 64, 64).ranked, 20);
  // A count that is not adaptive is not halved.
  EXPECT_EQ(HeavySet::Of(512, false, 0, 1150, 64, 64).ranked, 512);
}

TEST(PilotCount, IsThePolicysWithoutALimit) {
  EXPECT_EQ(PilotCount(48, kUnlimited, 7, 97), 48);
  // A stratum of at most two pilots is taken whole.
  EXPECT_EQ(PilotCount(48, kUnlimited, 7, 96), 96);
  EXPECT_EQ(PilotCount(48, kUnlimited, 7, 3), 3);
  EXPECT_EQ(PilotCount(int64_t{1} << 40, kUnlimited, 7, int64_t{1} << 42), int64_t{1} << 40);
}

TEST(PilotCount, ALimitGivesEachStratumHalfOfItsShare) {
  EXPECT_EQ(PilotCount(48, 480, 5, 1000), 48);  // 480 / (2 * 5)
  EXPECT_EQ(PilotCount(48, 479, 5, 1000), 47);
  EXPECT_EQ(PilotCount(48, 100, 5, 1000), 10);
  EXPECT_EQ(PilotCount(48, 100, 5, 20), 20);
}

TEST(RowShare, CutsInProportionToWhatIsAskedBeyondThePilot) {
  // 100 rows left, 40 drawn, 160 asked for: half of what is asked for beyond the pilot.
  const RowShare share = RowShare::Of(100, 40, 160);
  EXPECT_EQ(share.Cut(10, 90), 50);
  EXPECT_EQ(share.Cut(30, 70), 50);
  EXPECT_EQ(share.Cut(10, 10), 10);
  // If no more rows are asked for, nothing is divided by 0.
  EXPECT_EQ(RowShare::Of(100, 40, 40).Cut(40, 40), 40);
}

}  // namespace
}  // namespace spillway
