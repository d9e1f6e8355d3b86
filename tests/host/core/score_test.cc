#include "host/core/score.h"

#include <gtest/gtest.h>

#include <cmath>

namespace spillway {
namespace {

TEST(ScoreExp2, IsWithinItsErrorBound) {
  double worst = 0;
  for (double x = kScoreMin; x <= kScoreMax; x += 1.0 / 4099) {
    const float rounded = static_cast<float>(x);
    const double exact = std::exp2(double{rounded});
    worst = std::max(worst, std::fabs(ScoreExp2(rounded) - exact) / exact);
  }
  EXPECT_LT(worst, 1e-5);
}

TEST(ScoreExp2, ClampsAtBothEnds) {
  EXPECT_EQ(ScoreExp2(1e30f), ScoreExp2(kScoreMax));
  EXPECT_EQ(ScoreExp2(HUGE_VALF), ScoreExp2(kScoreMax));
  EXPECT_EQ(ScoreExp2(-HUGE_VALF), ScoreExp2(kScoreMin));
  EXPECT_NEAR(ScoreExp2(kScoreMax) / std::exp2(80.0), 1, 1e-4);
  EXPECT_GT(ScoreExp2(kScoreMin), 0);
}

// The order by score is the order by logit.
TEST(ScoreExp2, GrowsWithItsArgument) {
  float before = 0;
  for (float x = kScoreMin; x < kScoreMax; x += 1e-3f) {
    const float y = ScoreExp2(x);
    ASSERT_GT(y, before) << "at " << x;
    before = y;
  }
}

TEST(ScoreMass, SumsToTheInverseOfTheHeadWeight) {
  uint64_t mass = 0;
  double sum = 0;
  for (int i = 0; i < 5000; ++i) {
    const float x = static_cast<float>(i) * 0.01f;
    mass += ScoreMass(x, 50);
    sum += std::exp2(double{x} - 50);
  }
  EXPECT_NEAR(ScoreHeadWeight(mass) * sum, 1, 1e-4);
}

// Equal logits so far from zero that anything added to them would vanish.
TEST(ScoreMass, WeighsFlatHeadsDownWhateverTheirLogits) {
  uint64_t mass = 0;
  for (int i = 0; i < 4096; ++i) mass += ScoreMass(-1e27f, -1e27f);
  EXPECT_NEAR(ScoreHeadWeight(mass) * 4096, 1, 1e-4);
}

}  // namespace
}  // namespace spillway
