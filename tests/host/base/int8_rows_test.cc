#include "host/base/int8_rows.h"

#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <random>
#include <vector>

#include "host/base/elements.h"

namespace spillway {
namespace {

RowFormat Format(DType dtype, int d) { return {dtype, RowType::kInt8, d}; }

struct Row {
  std::vector<float> k, v;
};

// K and V as the dtype has them.
std::vector<std::byte> Narrow(DType dtype, const std::vector<float>& x) {
  std::vector<std::byte> bytes(x.size() * DTypeBytes(dtype));
  FromFloat(dtype, x.data(), static_cast<int64_t>(x.size()), bytes.data());
  return bytes;
}
std::vector<float> Widen(DType dtype, const std::vector<std::byte>& bytes) {
  std::vector<float> x(bytes.size() / DTypeBytes(dtype));
  ToFloat(dtype, bytes.data(), static_cast<int64_t>(x.size()), x.data());
  return x;
}

std::vector<std::byte> Encode(const RowFormat& format, const Row& row) {
  std::vector<std::byte> stored(static_cast<size_t>(format.row_bytes()));
  EncodeInt8Row(format, Narrow(format.dtype, row.k).data(), Narrow(format.dtype, row.v).data(),
                stored.data());
  return stored;
}

Row Decode(const RowFormat& format, const std::vector<std::byte>& stored) {
  std::vector<std::byte> k(static_cast<size_t>(format.element_bytes() / 2)), v = k;
  DecodeInt8Row(format, stored.data(), k.data(), v.data());
  return {Widen(format.dtype, k), Widen(format.dtype, v)};
}

Row Random(const RowFormat& format, uint64_t seed) {
  std::mt19937_64 random(seed);
  std::normal_distribution<float> normal;
  Row row;
  for (std::vector<float>* x : {&row.k, &row.v}) {
    x->resize(format.head_dim);
    for (float& e : *x) e = normal(random);
    *x = Widen(format.dtype, Narrow(format.dtype, *x));
  }
  return row;
}

TEST(Int8RowsTest, RowBytesAreCodesScalesAndHighParts) {
  EXPECT_EQ(Format(DType::kBF16, 64).row_bytes(), 2 * 64 + 4 + 2 * (4 + 26));
  EXPECT_EQ(Format(DType::kBF16, 128).row_bytes(), 2 * 128 + 4 + 2 * (4 + 26));
  for (int d = 16; d <= 256; d += 16) {
    EXPECT_EQ(Format(DType::kF32, d).row_bytes() % 64, 0) << d;
  }
}

// A vector whose scale is 1, written out: the 13th largest of 16 elements is 127.
TEST(Int8RowsTest, BytesAreAsDescribed) {
  const RowFormat format = Format(DType::kF32, 16);
  Row row{std::vector<float>(16, 0.0f), std::vector<float>(16, 0.0f)};
  row.k = {1000, -2000, 300, 400, 500, 600, 700, 800, 900, -301, 302, 303, 127, -127, 0, 3.4f};
  row.v = {0, 64, -2, 1, 32, 0, 16, 0, -8, 0, 0, 0, 0, 0, 0, 0};
  const std::vector<std::byte> stored = Encode(format, row);
  const auto code = [&](int i) { return static_cast<int>(static_cast<int8_t>(stored[i])); };
  // 1000 = 4 * 254 - 16; -2000 = -8 * 254 + 32; 300 = 254 + 46; -301 = -254 - 47.
  EXPECT_EQ(code(0), -16);
  EXPECT_EQ(code(1), 32);
  EXPECT_EQ(code(2), 46);
  EXPECT_EQ(code(9), -47);
  EXPECT_EQ(code(12), 127);
  EXPECT_EQ(code(13), -127);
  EXPECT_EQ(code(14), 0);
  EXPECT_EQ(code(15), 3);
  float scales[2];
  ToFloat(DType::kBF16, stored.data() + 32, 2, scales);
  EXPECT_EQ(scales[0], 1.0f);
  // V's fifth largest is 2: 2 / 127, rounded up to 7 bits.
  EXPECT_EQ(scales[1], 0x1.04p-6f);
  // In descending order of size; of equal ones, the first element first.
  const int elements[] = {1, 0, 8, 7, 6, 5, 4, 3, 11, 10, 9, 2};
  const int highs[] = {-8, 4, 4, 3, 3, 2, 2, 2, 1, 1, -1, 1};
  for (int n = 0; n < 12; ++n) {
    EXPECT_EQ(static_cast<int>(stored[44 + 2 * n]), elements[n]) << n;
    EXPECT_EQ(code(45 + 2 * n), highs[n]) << n;
  }
  const int of_values[] = {1, 4, 6, 8};
  for (int n = 0; n < 4; ++n) EXPECT_EQ(static_cast<int>(stored[36 + 2 * n]), of_values[n]) << n;
  for (int i = 68; i < 128; ++i) EXPECT_EQ(code(i), 0) << i;
  const Row read = Decode(format, stored);
  const std::vector<float> keys = {1000, -2000, 300, 400, 500, 600,  700, 800,
                                   900,  -301,  302, 303, 127, -127, 0,   3};
  EXPECT_EQ(read.k, keys);
  EXPECT_NEAR(read.v[1], 64, 0x1.04p-7);
  EXPECT_NEAR(read.v[2], -2, 0x1.04p-7);
}

class Int8RowsOfTest : public testing::TestWithParam<std::tuple<DType, int>> {
 protected:
  const RowFormat format_ = Format(std::get<0>(GetParam()), std::get<1>(GetParam()));
};
INSTANTIATE_TEST_SUITE_P(, Int8RowsOfTest,
                         testing::Combine(testing::Values(DType::kF32, DType::kF16, DType::kBF16),
                                          testing::Values(16, 64, 80, 128, 256)));

// No element is further from the truth than half a step, and the dtype's own rounding.
TEST_P(Int8RowsOfTest, ElementsAreWithinHalfAStep) {
  const float relative = format_.dtype == DType::kF32   ? 0x1p-23f
                         : format_.dtype == DType::kF16 ? 0x1p-11f
                                                        : 0x1p-8f;
  for (uint64_t seed = 0; seed < 50; ++seed) {
    Row row = Random(format_, seed);
    row.k[seed % format_.head_dim] *= 128;
    const Row read = Decode(format_, Encode(format_, row));
    const auto check = [&](std::vector<float> right, const std::vector<float>& got,
                           int high_count) {
      std::vector<float> sizes;
      for (const float x : right) sizes.push_back(std::fabs(x));
      std::sort(sizes.rbegin(), sizes.rend());
      const float rest =
          high_count < format_.head_dim ? sizes[high_count] : 0;  // without a high part
      const float step = 1.02f * std::max(rest / 127, sizes[0] / 32384);
      for (int i = 0; i < format_.head_dim; ++i) {
        EXPECT_NEAR(got[i], right[i], 0.5f * step + relative * std::fabs(right[i])) << seed << i;
      }
    };
    check(row.k, read.k, format_.head_dim == 16 ? 12 : 26);
    check(row.v, read.v, 4);
  }
}

// Numbers at the ends of the dtype's range stay finite.
TEST_P(Int8RowsOfTest, ExtremeElementsStayFinite) {
  const float largest = format_.dtype == DType::kF32   ? 3.4028235e38f
                        : format_.dtype == DType::kF16 ? 65504.0f
                                                       : 3.3895314e38f;
  for (const float x : {largest, -largest, 1e-45f, 0.0f}) {
    Row row = Random(format_, 1);
    for (float& k : row.k) k = x;
    for (int i = 0; i < format_.head_dim; ++i) row.v[i] = i % 2 == 0 ? x : -x / 3;
    const std::vector<std::byte> stored = Encode(format_, row);
    EXPECT_TRUE(IsInt8Row(format_, stored.data()));
    const Row read = Decode(format_, stored);
    for (int i = 0; i < format_.head_dim; ++i) {
      EXPECT_TRUE(std::isfinite(read.k[i])) << i;
      EXPECT_TRUE(std::isfinite(read.v[i])) << i;
      if (std::fabs(x) > 1) EXPECT_NEAR(read.k[i] / x, 1, 0.02) << i;
    }
  }
}

TEST(Int8RowsTest, RowsOfUnknownBytesAreChecked) {
  const RowFormat format = Format(DType::kF16, 80);
  const std::vector<std::byte> good = Encode(format, Random(format, 3));
  ASSERT_TRUE(IsInt8Row(format, good.data()));
  std::vector<std::byte> bad = good;
  bad[164] = std::byte{80};  // an element that the vector does not have
  EXPECT_FALSE(IsInt8Row(format, bad.data()));
  bad = good;
  bad[161] = std::byte{0xFF};  // a scale below 0
  EXPECT_FALSE(IsInt8Row(format, bad.data()));
  bad = good;
  bad[160] = std::byte{0x80}, bad[161] = std::byte{0x7F};  // infinity
  EXPECT_FALSE(IsInt8Row(format, bad.data()));
  bad = good;
  bad[160] = std::byte{0x00}, bad[161] = std::byte{0x46};  // 8192: beyond f16 with the codes
  EXPECT_FALSE(IsInt8Row(format, bad.data()));
}

}  // namespace
}  // namespace spillway
