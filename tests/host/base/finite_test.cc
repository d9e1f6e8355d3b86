#include "host/base/finite.h"

#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <limits>
#include <random>
#include <vector>

namespace spillway {
namespace {

template <typename T>
std::span<const std::byte> Bytes(const std::vector<T>& v) {
  return std::as_bytes(std::span<const T>(v));
}

// Whether 16 bits are finite, by the value they stand for.
bool FiniteHalf(uint16_t bits) { return (bits >> 10 & 31) != 31; }
bool FiniteBFloat(uint16_t bits) {
  const uint32_t wide = uint32_t{bits} << 16;
  float value;
  std::memcpy(&value, &wide, sizeof(value));
  return std::isfinite(value);
}

TEST(FindNonFinite, EverySixteenBitPattern) {
  for (int bits = 0; bits < 65536; ++bits) {
    const std::vector<uint16_t> one = {0, static_cast<uint16_t>(bits)};
    EXPECT_EQ(FindNonFinite(Bytes(one), DType::kF16).has_value(), !FiniteHalf(one[1])) << bits;
    EXPECT_EQ(FindNonFinite(Bytes(one), DType::kBF16).has_value(), !FiniteBFloat(one[1])) << bits;
  }
}

TEST(FindNonFinite, FindsTheFirstAtEveryPlace) {
  constexpr float kBad[] = {std::numeric_limits<float>::infinity(),
                            -std::numeric_limits<float>::infinity(),
                            std::numeric_limits<float>::quiet_NaN()};
  std::mt19937 rng(7);
  for (const int size : {1, 2, 1023, 1024, 1025, 5000}) {
    std::vector<float> data(size);
    for (float& x : data) x = std::ldexp(1.0f + (rng() % 100) / 100.0f, int(rng() % 250) - 125);
    EXPECT_EQ(FindNonFinite(Bytes(data), DType::kF32), std::nullopt) << size;
    for (int i = 0; i < size; i += 1 + size / 97) {
      std::vector<float> bad = data;
      bad[i] = kBad[i % 3];
      bad[size - 1] = kBad[2];
      EXPECT_EQ(FindNonFinite(Bytes(bad), DType::kF32), i) << size;
    }
  }
}

TEST(FindNonFinite, LargestAndSmallestValuesAreFinite) {
  const std::vector<float> edge = {std::numeric_limits<float>::max(),
                                   std::numeric_limits<float>::lowest(),
                                   std::numeric_limits<float>::denorm_min(), -0.0f};
  EXPECT_EQ(FindNonFinite(Bytes(edge), DType::kF32), std::nullopt);
  EXPECT_EQ(FindNonFinite({}, DType::kBF16), std::nullopt);
}

TEST(FindNonFinite, TakesUnalignedBytes) {
  std::vector<std::byte> raw(1 + 2 * 3000);
  EXPECT_EQ(FindNonFinite(std::span(raw).subspan(1), DType::kBF16), std::nullopt);
  const uint16_t nan = 0x7fc0;
  std::memcpy(raw.data() + 1 + 2 * 2500, &nan, sizeof(nan));
  EXPECT_EQ(FindNonFinite(std::span<const std::byte>(raw).subspan(1), DType::kBF16), 2500);
}

}  // namespace
}  // namespace spillway
