#include "host/core/score.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <vector>

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
  EXPECT_NEAR(ScoreExp2(kScoreMax) / std::exp(20.0), 1, 1e-4);
  EXPECT_GT(ScoreExp2(kScoreMin), 0);
}

// Ranks by score are ranks by logit.
TEST(ScoreExp2, GrowsWithItsArgument) {
  float before = 0;
  for (float x = kScoreMin; x < kScoreMax; x += 1e-3f) {
    const float y = ScoreExp2(x);
    ASSERT_GT(y, before) << "at " << x;
    before = y;
  }
}

TEST(ScoreReference, IsTheMaximumAndTheInverseOfTheSum) {
  std::vector<float> sample;
  double sum = 0;
  for (int i = 0; i < 5000; ++i) sample.push_back(static_cast<float>(i * 7919 % 5000) * 0.01f);
  for (const float x : sample) sum += std::exp2(double{x} - 49.99);
  for (const bool reversed : {false, true}) {
    if (reversed) std::reverse(sample.begin(), sample.end());
    ScoreReference reference;
    for (const float x : sample) reference.Raise(x);
    for (const float x : sample) reference.Sum(x);
    EXPECT_EQ(reference.max(), 4999 * 0.01f);
    EXPECT_NEAR(reference.weight() * sum, 1, 1e-4);
  }
}

// Equal logits far from zero: what is added to them would vanish.
TEST(ScoreReference, WeighsFlatHeadsDownWhateverTheirLogits) {
  ScoreReference reference;
  for (int i = 0; i < 4096; ++i) reference.Raise(-1e27f);
  for (int i = 0; i < 4096; ++i) reference.Sum(-1e27f);
  EXPECT_NEAR(reference.weight() * 4096, 1, 1e-4);
}

}  // namespace
}  // namespace spillway
