#include "host/core/normal.h"

#include <gtest/gtest.h>

#include <cmath>

namespace spillway {
namespace {

TEST(NormalQuantile, MatchesTables) {
  EXPECT_NEAR(NormalQuantile(0.5), 0, 1e-12);
  EXPECT_NEAR(NormalQuantile(0.95), 1.6448536269514722, 1e-9);
  EXPECT_NEAR(NormalQuantile(0.975), 1.9599639845400545, 1e-9);
  EXPECT_NEAR(NormalQuantile(0.995), 2.5758293035489004, 1e-9);
  EXPECT_NEAR(NormalQuantile(0.9999999), 5.199337582192817, 1e-8);
  EXPECT_NEAR(NormalQuantile(0.05), -1.6448536269514722, 1e-9);
}

TEST(NormalQuantile, InvertsTheDistributionFunction) {
  for (double p = 1e-12; p < 0.5; p *= 1.7) {
    for (const double x : {NormalQuantile(p), -NormalQuantile(1 - p)}) {
      // 1 - p has lost some digits.
      const double tolerance = 1e-9 * p + 3e-16;
      EXPECT_NEAR(0.5 * std::erfc(-x / std::sqrt(2.0)), p, tolerance) << "p " << p;
    }
  }
}

}  // namespace
}  // namespace spillway
