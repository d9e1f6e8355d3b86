#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <random>
#include <tuple>
#include <vector>

#include "host/cpu/kernels.h"
#include "tests/host/cpu/code_page.h"
#include "tests/host/cpu/targets.h"
#include "tests/reference/elements.h"

namespace spillway {
namespace {

// Parameters: head_dim, bits per dimension, dtype.
class Encode : public ::testing::TestWithParam<std::tuple<int, int, DType>> {
 protected:
  Encode()
      : d_(std::get<0>(GetParam())),
        bits_(std::get<1>(GetParam())),
        dtype_(std::get<2>(GetParam())),
        encoder_(d_, bits_, 42),
        random_(d_ * 8 + bits_) {
    std::normal_distribution<float> normal;
    for (float& c : encoder_.centre) c = 0.5f * normal(random_);
    // A page of rows [K | V]; V must not affect the codes.
    rows_.resize(kPageTokenCount * 2 * d_);
    for (float& x : rows_) x = static_cast<float>(reference::Round(dtype_, normal(random_)));
    bytes_ = reference::Bytes(dtype_, rows_);
  }

  CodePage EncodedPage() const {
    CodePage page(encoder_.params.layout);
    for (int tile = 0; tile < kTilesPerPage; ++tile) {
      EncodeTile(encoder_.params, dtype_, bytes_.data() + tile * kTileTokenCount * row_bytes(),
                 row_bytes(), page.data(), tile);
    }
    return page;
  }
  int64_t row_bytes() const { return int64_t{2} * d_ * DTypeBytes(dtype_); }

  const int d_;
  const int bits_;
  const DType dtype_;
  Encoder encoder_;
  std::mt19937 random_;
  std::vector<float> rows_;
  std::vector<std::byte> bytes_;
};

TEST_P(Encode, EveryTargetGivesTheSameBits) {
  SameOnEveryTarget([&](std::vector<std::byte>& out) { AppendBytes(EncodedPage().bytes(), out); });
}

TEST_P(Encode, MatchesTheDoubleReference) {
  const CodePage page = EncodedPage();
  const std::vector<double> centre(encoder_.centre.begin(), encoder_.centre.end());
  int compared = 0;
  for (int slot = 0; slot < kPageTokenCount; ++slot) {
    const auto key = rows_.begin() + slot * 2 * d_;
    const reference::RotationCode code = reference::EncodeRotated(
        std::vector<double>(key, key + d_), centre, encoder_.rotation, bits_);
    if (code.border_distance < 1e-4) continue;  // fp32 may fall on the other side
    ++compared;
    for (int j = 0; j < d_; ++j) ASSERT_EQ(page.Level(slot, j), code.levels[j]) << slot << " " << j;
    // If the exact factor is close to a tie, it may differ by one step of bfloat16.
    const double tolerance = code.factor_margin < 1e-5 ? code.factor / 128 : 0;
    ASSERT_NEAR(page.Factor(slot), code.factor, tolerance) << slot;
  }
  EXPECT_GT(compared, kPageTokenCount * 3 / 4);
}

TEST_P(Encode, PaddingBitsAreZero) {
  CodePage page(encoder_.params.layout);
  std::fill_n(page.data(), page.bytes().size(), std::byte{0xAB});
  EncodeTile(encoder_.params, dtype_, bytes_.data(), row_bytes(), page.data(), 3);
  for (int slot = 48; slot < 64; ++slot) {
    for (int j = d_; j < encoder_.params.layout.dims; ++j) {
      ASSERT_EQ(page.Level(slot, j), 0);
    }
  }
}

INSTANTIATE_TEST_SUITE_P(
    Shapes, Encode,
    ::testing::Combine(::testing::Values(16, 64, 80, 96, 128, 256), ::testing::Values(1, 2, 3, 4),
                       ::testing::Values(DType::kF32, DType::kF16, DType::kBF16)),
    [](const auto& info) {
      return "d" + std::to_string(std::get<0>(info.param)) + "b" +
             std::to_string(std::get<1>(info.param)) +
             std::string(DTypeName(std::get<2>(info.param)));
    });

TEST_P(Encode, StoredCodesAreReadBack) {
  CodePage page(encoder_.params.layout);
  std::vector<std::vector<uint8_t>> codes(kPageTokenCount);
  for (int slot = 0; slot < kPageTokenCount; ++slot) {
    codes[slot].assign(encoder_.params.layout.dims, 0);
    for (int j = 0; j < d_; ++j) codes[slot][j] = static_cast<uint8_t>(random_() % (1u << bits_));
    StoreCode(encoder_.params.layout, codes[slot].data(), page.data(), slot);
  }
  for (int slot = 0; slot < kPageTokenCount; ++slot) {
    for (int j = 0; j < encoder_.params.layout.dims; ++j) {
      ASSERT_EQ(page.Level(slot, j), codes[slot][j]) << slot << " " << j;
    }
  }
}

// One key at its centre, one very far from it, and one very close to it.
TEST(EncodeExtremes, FactorsAreFiniteAndZeroAtTheCentre) {
  constexpr int kD = 64;
  Encoder encoder(kD, 2, 7);
  std::vector<float> rows(kTileTokenCount * 2 * kD, 0.0f);
  for (int i = 0; i < kD; ++i) {
    encoder.centre[i] = 0.25f * static_cast<float>(i % 3);
    rows[i] = encoder.centre[i];
    rows[2 * kD + i] = (i % 2 == 0 ? 1.0f : -1.0f) * 1e30f;
    rows[4 * kD + i] = encoder.centre[i];
  }
  rows[4 * kD + 9] += 1e-6f;
  const std::vector<std::byte> bytes = reference::Bytes(DType::kF32, rows);
  CodePage page(encoder.params.layout);
  EncodeTile(encoder.params, DType::kF32, bytes.data(), 2 * kD * 4, page.data(), 0);
  EXPECT_EQ(page.Factor(0), 0);
  // f is about ||k - c|| over a number near sqrt(d).
  EXPECT_NEAR(page.Factor(1) / 1e30, 1, 0.5);
  EXPECT_GT(page.Factor(2), 0);
  EXPECT_LT(page.Factor(2), 1e-5);
}

// The order of RadiusOf(): elements are divided by the largest, then summed by a chain of fused
// multiply-adds.
TEST_P(Encode, DistancesAreInOneOrder) {
  SameOnEveryTarget([&](std::vector<std::byte>& out) {
    std::vector<float> distances(kPageTokenCount);
    Distances(dtype_, bytes_.data(), row_bytes(), kPageTokenCount, d_, encoder_.centre.data(),
              distances.data());
    for (int t = 0; t < kPageTokenCount; ++t) {
      const float* key = rows_.data() + t * 2 * d_;
      float largest = 0, squares = 0;
      for (int i = 0; i < d_; ++i) {
        largest = std::max(largest, std::fabs(key[i] - encoder_.centre[i]));
      }
      for (int i = 0; i < d_; ++i) {
        const float x = (key[i] - encoder_.centre[i]) / largest;
        squares = std::fma(x, x, squares);
      }
      ASSERT_EQ(distances[t], largest * std::sqrt(squares)) << t;
    }
    AppendBytes(distances, out);
  });
}

// Vectors whose squares fp32 cannot hold, and a vector of zeros.
TEST(Distances, OfHugeAndTinyVectors) {
  constexpr int kD = 32;
  std::vector<float> vectors(kTileTokenCount * kD), centre(kD);
  for (int t = 0; t < kTileTokenCount; ++t) {
    const auto size = static_cast<float>(std::pow(10.0, -40 + 5 * t));
    for (int i = 0; i < kD; ++i) vectors[t * kD + i] = t == 0 || i % 2 == 0 ? 0 : size;
  }
  SameOnEveryTarget([&](std::vector<std::byte>& out) {
    std::vector<float> distances(kTileTokenCount);
    Distances(DType::kF32, reinterpret_cast<const std::byte*>(vectors.data()), kD * 4,
              kTileTokenCount, kD, centre.data(), distances.data());
    EXPECT_EQ(distances[0], 0);
    for (int t = 1; t < kTileTokenCount; ++t) {
      EXPECT_NEAR(distances[t] / (4.0 * vectors[t * kD + 1]), 1, 1e-6) << t;
    }
    AppendBytes(distances, out);
  });
}

TEST(Rotate, IsTheMatrixProduct) {
  for (const int d : {16, 64, 80, 96, 128, 240, 256}) {
    Encoder encoder(d, 2, 11);
    std::mt19937 random(d);
    std::normal_distribution<float> normal;
    std::vector<float> x(d);
    for (float& e : x) e = normal(random);
    SameOnEveryTarget([&](std::vector<std::byte>& out) {
      std::vector<float> y(d);
      Rotate(encoder.params, x.data(), y.data());
      const std::vector<double> wanted =
          reference::Rotated(encoder.rotation, std::vector<double>(x.begin(), x.end()));
      for (int j = 0; j < d; ++j) EXPECT_NEAR(y[j], wanted[j], 1e-5) << "d " << d;
      AppendBytes(y, out);
    });
  }
}

}  // namespace
}  // namespace spillway
