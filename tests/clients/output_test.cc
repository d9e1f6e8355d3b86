#include "cli/output.h"

#include <bit>
#include <cmath>
#include <cstring>
#include <limits>
#include <sstream>

#include "cli/random_rows.h"
#include "gtest/gtest.h"

namespace spillway::cli {
namespace {

TEST(Output, Bytes) {
  EXPECT_EQ(FormatBytes(0), "0 B");
  EXPECT_EQ(FormatBytes(1023), "1023 B");
  EXPECT_EQ(FormatBytes(1024), "1.00 KiB");
  EXPECT_EQ(FormatBytes(int64_t{24} << 30), "24.0 GiB");
  EXPECT_EQ(FormatBytes(std::numeric_limits<int64_t>::max()), "8.00 EiB");
}

TEST(Output, Counts) {
  EXPECT_EQ(FormatCount(0), "0");
  EXPECT_EQ(FormatCount(999), "999");
  EXPECT_EQ(FormatCount(1000), "1,000");
  EXPECT_EQ(FormatCount(-123456), "-123,456");
  EXPECT_EQ(FormatCount(1234567), "1,234,567");
}

TEST(Output, Shares) {
  EXPECT_EQ(FormatShare(1, 8), "12.5 %");
  EXPECT_EQ(FormatShare(0, 0), "-");
}

TEST(Output, Ages) {
  EXPECT_EQ(FormatAge(absl::ZeroDuration()), "0 s");
  EXPECT_EQ(FormatAge(absl::Seconds(61)), "1 min 1 s");
  EXPECT_EQ(FormatAge(absl::Hours(3)), "3 h");
  EXPECT_EQ(FormatAge(absl::Hours(49) + absl::Seconds(5)), "2 d 1 h");
}

TEST(Output, TableAlignsColumns) {
  Table table({"NAME", "COUNT"});
  table.AddRow({"a", "1"});
  table.AddRow({"longer", "1,000"});
  std::ostringstream out;
  table.Print(out);
  EXPECT_EQ(out.str(),
            "NAME    COUNT\n"
            "a           1\n"
            "longer  1,000\n");
}

float Half(uint16_t bits) { return static_cast<float>(std::bit_cast<_Float16>(bits)); }
float Bf16(uint16_t bits) { return std::bit_cast<float>(static_cast<uint32_t>(bits) << 16); }

TEST(RandomRows, SameSeedSameNormalValuesInEveryDType) {
  constexpr size_t kCount = 100'001;
  RandomRows f32(v1::DTYPE_F32, 3, 7);
  RandomRows f16(v1::DTYPE_F16, 3, 7);
  RandomRows bf16(v1::DTYPE_BF16, 3, 7);
  const std::string a = f32.Draw(kCount);
  const std::string b = f16.Draw(kCount);
  const std::string c = bf16.Draw(kCount);
  ASSERT_EQ(a.size(), kCount * 4);
  ASSERT_EQ(b.size(), kCount * 2);
  ASSERT_EQ(c.size(), kCount * 2);
  double sum = 0;
  double squares = 0;
  for (size_t at = 0; at < kCount; ++at) {
    float value;
    uint16_t half;
    uint16_t brain;
    std::memcpy(&value, &a[at * 4], 4);
    std::memcpy(&half, &b[at * 2], 2);
    std::memcpy(&brain, &c[at * 2], 2);
    // The error is at most half a unit in the last place of each type; near 0, f16 is subnormal.
    EXPECT_NEAR(Half(half), value, std::abs(value) / 2048 + 1e-7);
    EXPECT_NEAR(Bf16(brain), value, std::abs(value) / 256);
    sum += value;
    squares += value * value;
  }
  // The tolerance is five standard errors.
  EXPECT_NEAR(sum / kCount, 0, 5 * 3 / std::sqrt(kCount));
  EXPECT_NEAR(squares / kCount, 9, 5 * 9 * std::sqrt(2.0 / kCount) * 1.5);
  EXPECT_NE(f32.Draw(kCount), a);
}

}  // namespace
}  // namespace spillway::cli
