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
  // 100 rows left, 40 drawn, 160 asked for: half of what is beyond the pilot.
  const RowShare share = RowShare::Of(100, 40, 160);
  EXPECT_EQ(share.Cut(10, 90), 50);
  EXPECT_EQ(share.Cut(30, 70), 50);
  EXPECT_EQ(share.Cut(10, 10), 10);
  // Nothing is asked for: nothing is divided by 0.
  EXPECT_EQ(RowShare::Of(100, 40, 40).Cut(40, 40), 40);
}

}  // namespace
}  // namespace spillway
