#include "tests/reference/elements.h"

#include <gtest/gtest.h>

#include <bit>
#include <cmath>
#include <cstring>
#include <random>
#include <vector>

#include "host/base/elements.h"
#include "host/cpu/kernels.h"
#include "tests/host/cpu/targets.h"

namespace spillway {
namespace {

class Elements : public ::testing::TestWithParam<DType> {};

TEST_P(Elements, ConvertAsTheReferenceDoes) {
  const DType dtype = GetParam();
  std::mt19937 random(1);
  std::uniform_real_distribution<float> exponent(-22, 15.9f);
  std::normal_distribution<float> sign;
  for (const int64_t count : {1, 7, 16, 33, 256}) {
    std::vector<float> x(count), rounded(count);
    for (float& e : x) e = std::copysign(std::exp2(exponent(random)), sign(random));
    for (int64_t i = 0; i < count; ++i) {
      rounded[i] = static_cast<float>(reference::Round(dtype, x[i]));
    }
    const std::vector<std::byte> wanted = reference::Bytes(dtype, rounded);
    const std::vector<std::byte> got = SameOnEveryTarget([&](std::vector<std::byte>& bytes) {
      std::vector<std::byte> narrow(count * DTypeBytes(dtype));
      FromFloat(dtype, x.data(), count, narrow.data());
      std::vector<float> wide(count);
      ToFloat(dtype, narrow.data(), count, wide.data());
      EXPECT_EQ(wide, rounded);
      AppendBytes(narrow, bytes);
    });
    EXPECT_EQ(got, wanted) << count << " elements";
  }
}

INSTANTIATE_TEST_SUITE_P(DTypes, Elements,
                         ::testing::Values(DType::kF32, DType::kF16, DType::kBF16),
                         [](const auto& info) { return std::string(DTypeName(info.param)); });

TEST(Elements, TiesGoToEven) {
  // bfloat16 has 8 significant bits: 257 lies between 256 and 258.
  const float x[] = {257.0f, 259.0f, -257.0f};
  std::vector<std::byte> narrow(6);
  float wide[3];
  FromFloat(DType::kBF16, x, 3, narrow.data());
  ToFloat(DType::kBF16, narrow.data(), 3, wide);
  EXPECT_EQ(wide[0], 256.0f);
  EXPECT_EQ(wide[1], 260.0f);
  EXPECT_EQ(wide[2], -256.0f);
}

}  // namespace
}  // namespace spillway
