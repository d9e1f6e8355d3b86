#include "host/core/query_code.h"

#include <gtest/gtest.h>

#include <limits>
#include <utility>

#include "host/core/reference_pages.h"
#include "host/core/sample_limit.h"

namespace spillway {
namespace {

TEST(QueryLevel, RoundsToTheNearestOfSixteen) {
  const float step = QueryStep(15.0f);
  EXPECT_EQ(step, 2.0f);
  // Level w stands for (w + 1/2) 2: -15, -13, ..., 15. Ties of y / s - 1/2 go to even.
  for (const auto& [y, level] :
       {std::pair(15.0f, 7), std::pair(-15.0f, -8), std::pair(1.0f, 0), std::pair(-1.0f, -1),
        std::pair(2.1f, 1), std::pair(1.9f, 0), std::pair(2.0f, 0), std::pair(4.0f, 2),
        std::pair(40.0f, 7), std::pair(-40.0f, -8)}) {
    EXPECT_EQ(QueryLevel(y, step), level) << y;
  }
  EXPECT_EQ(QueryWeight(7), 15);
  EXPECT_EQ(QueryWeight(-8), -15);
}

TEST(QueryLevel, IsOneOfSixteenOfWhatIsNoNumberToo) {
  constexpr float kInfinity = std::numeric_limits<float>::infinity();
  constexpr float kNan = std::numeric_limits<float>::quiet_NaN();
  EXPECT_EQ(QueryLevel(kInfinity, kInfinity), -8);
  EXPECT_EQ(QueryLevel(kNan, 1.0f), -8);
  EXPECT_EQ(QueryLevel(kInfinity, 1.0f), 7);
  EXPECT_EQ(QueryLevel(-kInfinity, 1.0f), -8);
}

TEST(QueryErrorSquare, IsOfWhatTheLevelMisses) {
  EXPECT_EQ(QueryErrorSquare(3.0f, 1, 2.0f), 0);  // level 1 stands for 3
  EXPECT_EQ(QueryErrorSquare(3.5f, 1, 2.0f), 0.25f);
  EXPECT_EQ(QueryErrorSquare(-15.0f, -8, 2.0f), 0);
  EXPECT_EQ(QueryErrorSquare(-17.0f, -8, 2.0f), 4);
  EXPECT_EQ(QueryErrorSquare(0.0f, 0, 0.0f), 0);  // a query of zeros
}

TEST(QueryOffset, CentresTheCodes) {
  // B = 3: codes 0 .. 7 stand for 2u - 7. Weights 15 and -1, codes 5 and 2:
  // 15 * 3 + -1 * -3 = 48 = 2 (75 - 2) + offset.
  EXPECT_EQ(2 * (15 * 5 - 2) + QueryOffset(3, 14), 48);
}

TEST(QueryCoefficient, IsCutToANumber) {
  EXPECT_FLOAT_EQ(QueryCoefficient(0.125f, 2.0f, 0.586f), 0.125f * 1.442695f * 2.0f * 0.1465f);
  EXPECT_EQ(QueryCoefficient(1.0f, 1e38f, 1.596f), 1.0e30f);
}

TEST(ReferencePages, EverySixtyFourthOrSixteen) {
  struct Case {
    int64_t begin, end, first, step, count;
  };
  for (const Case& c : {Case{64, 128 * 8 - 64, 0, 1, 8}, Case{64, 128 * 33, 0, 2, 17},
                        Case{0, 128 * 2048, 0, 64, 32}, Case{128 * 3 + 1, 128 * 3 + 2, 3, 1, 1}}) {
    const ReferencePages pages = ReferencePages::Of(c.begin, c.end);
    EXPECT_EQ(pages.first, c.first) << c.end;
    EXPECT_EQ(pages.step, c.step) << c.end;
    EXPECT_EQ(pages.count, c.count) << c.end;
  }
}

TEST(SampleLimits, LetThroughWhatLiesBelowTheThreshold) {
  EXPECT_EQ(PlaceLimit(0), 0);
  EXPECT_EQ(PlaceLimit(1), 1);
  EXPECT_EQ(PlaceLimit(uint64_t{1} << 17), 1);
  EXPECT_EQ(PlaceLimit((uint64_t{1} << 17) + 1), 2);
  EXPECT_EQ(PlaceLimit(uint64_t{1} << 32), kSampleLimitAll);
  const SampleOrder order = MakeSampleOrder(0, 0, 0, 1000, 1u << 20);
  EXPECT_EQ(HashLimit(order, uint64_t{1} << 20), 0);
  EXPECT_EQ(HashLimit(order, (uint64_t{1} << 20) + 1), 17);
  EXPECT_EQ(HashLimit(order, uint64_t{1} << 32), kSampleLimitAll);
}

}  // namespace
}  // namespace spillway
