#include "host/codes/rotation.h"

#include <gtest/gtest.h>

#include <cmath>
#include <numeric>
#include <vector>

namespace spillway {
namespace {

// Known answers of the Random123 distribution (tests/kat_vectors,
// philox4x32 with 10 rounds).
TEST(Philox, KnownAnswers) {
  using Block = std::array<uint32_t, 4>;
  EXPECT_EQ(Philox4x32({0, 0, 0, 0}, {0, 0}),
            (Block{0x6627e8d5, 0xe169c58d, 0xbc57ac4c, 0x9b00dbd8}));
  EXPECT_EQ(Philox4x32({~0u, ~0u, ~0u, ~0u}, {~0u, ~0u}),
            (Block{0x408f276d, 0x41c83b0e, 0xa20bc7c6, 0x6d5451fd}));
  EXPECT_EQ(Philox4x32({0x243f6a88, 0x85a308d3, 0x13198a2e, 0x03707344}, {0xa4093822, 0x299f31d0}),
            (Block{0xd16cfe09, 0x94fdcceb, 0x5001e420, 0x24126ea1}));
}

// Computed by LU decomposition with partial pivoting.
double Determinant(const std::vector<float>& p, int d) {
  std::vector<double> a(p.begin(), p.end());
  double det = 1;
  for (int j = 0; j < d; ++j) {
    int pivot = j;
    for (int i = j + 1; i < d; ++i) {
      if (std::abs(a[i * d + j]) > std::abs(a[pivot * d + j])) pivot = i;
    }
    if (pivot != j) {
      for (int k = 0; k < d; ++k) std::swap(a[j * d + k], a[pivot * d + k]);
      det = -det;
    }
    det *= a[j * d + j];
    for (int i = j + 1; i < d; ++i) {
      const double f = a[i * d + j] / a[j * d + j];
      for (int k = j; k < d; ++k) a[i * d + k] -= f * a[j * d + k];
    }
  }
  return det;
}

class Rotation : public ::testing::TestWithParam<int> {};

TEST_P(Rotation, IsOrthogonalWithDeterminantOne) {
  const int d = GetParam();
  for (const uint64_t seed : {uint64_t{0}, uint64_t{1}, ~uint64_t{0}}) {
    const std::vector<float> p = MakeRotation(d, seed, 5);
    ASSERT_EQ(p.size(), static_cast<size_t>(d) * d);
    for (int i = 0; i < d; ++i) {
      for (int j = 0; j <= i; ++j) {
        double dot = 0;
        for (int k = 0; k < d; ++k) dot += double{p[i * d + k]} * p[j * d + k];
        // Entries are rounded to fp32.
        ASSERT_NEAR(dot, i == j ? 1 : 0, 1e-6) << i << " " << j;
      }
    }
    EXPECT_NEAR(Determinant(p, d), 1, 1e-5) << "seed " << seed;
  }
}

INSTANTIATE_TEST_SUITE_P(Sizes, Rotation, ::testing::Values(2, 16, 63, 64, 80, 96, 128, 256));

TEST(RotationSeed, SameArgumentsGiveTheSameBitsAndOthersDoNot) {
  const std::vector<float> p = MakeRotation(64, 42, 3);
  EXPECT_EQ(p, MakeRotation(64, 42, 3));
  for (const auto& other : {MakeRotation(64, 43, 3), MakeRotation(64, 42, 4),
                            MakeRotation(64, 42 + (uint64_t{1} << 32), 3)}) {
    const double dot = std::inner_product(p.begin(), p.end(), other.begin(), 0.0);
    // Independent rotations: the trace of P^T P' is about standard normal.
    EXPECT_LT(std::abs(dot), 5);
  }
}

// Haar: each entry has mean 0, variance 1/d and the fourth moment
// 3 / (d (d + 2)) of a coordinate of a random unit vector.
TEST(RotationDistribution, EntriesHaveTheMomentsOfHaar) {
  constexpr int kD = 16, kDraws = 400;
  double first = 0, second = 0, fourth = 0, corner = 0, diagonal = 0;
  for (int i = 0; i < kDraws; ++i) {
    const std::vector<float> p = MakeRotation(kD, 1000 + i, 0);
    for (const float x : p) {
      first += x;
      second += double{x} * x;
      fourth += std::pow(double{x}, 4);
    }
    corner += p[0];
    for (int k = 0; k < kD; ++k) diagonal += p[k * kD + k];
  }
  const double n = double{kDraws} * kD * kD;
  EXPECT_NEAR(first / n, 0, 0.005);
  EXPECT_NEAR(second / n, 1.0 / kD, 1e-6);
  EXPECT_NEAR(fourth / n, 3.0 / (kD * (kD + 2)), 2e-4);
  // Without the sign fix, QR leaves diagonals of one sign. Tolerance: 5 standard errors.
  EXPECT_NEAR(corner / kDraws, 0, 5 * 0.25 / std::sqrt(kDraws));
  EXPECT_NEAR(diagonal / kDraws, 0, 5 * 1.0 / std::sqrt(kDraws));
}

}  // namespace
}  // namespace spillway
