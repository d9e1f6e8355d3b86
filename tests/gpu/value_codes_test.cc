// The codes of values in the GPU's page index, compared bit by bit with their definition
// (host/core/value_code.h), computed one value at a time.
#include <gtest/gtest.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <random>
#include <string>
#include <tuple>
#include <vector>

#include "host/codes/rotation.h"
#include "host/core/quantiser.h"
#include "host/core/value_code.h"
#include "tests/gpu/coded_layer.h"
#include "tests/gpu/page_reference.h"

namespace spillway::cuda {
namespace {

constexpr int64_t kPages = kFirstPageCount + 3;

// The centre of a page's values: per coordinate the median of the means of 16 runs, in bf16.
std::vector<float> CentreOf(const reference::Vectors& values) {
  std::vector<float> centre;
  for (size_t i = 0; i < values[0].size(); ++i) {
    std::vector<float> means;
    for (size_t run = 0; run < 16; ++run) {
      double sum = 0;
      for (size_t t = 0; t < 8; ++t) sum += values[run * 8 + t][i];
      means.push_back(static_cast<float>(sum / 8));
    }
    centre.push_back(reference::Widened(reference::ToBFloat16(reference::Median(means))));
  }
  return centre;
}

// Signs, then a Walsh-Hadamard transform, over the first entries and then over the last.
void Turn(std::vector<float>& x) {
  const int d = static_cast<int>(x.size());
  int size = 1;
  while (2 * size <= d) size *= 2;
  const auto scale = static_cast<float>(1 / std::sqrt(static_cast<double>(size)));
  for (int part = 0; part < (size == d ? 1 : 2); ++part) {
    float* const range = x.data() + (part == 0 ? 0 : d - size);
    for (int i = 0; i < size; ++i) {
      if (HadamardNegates(part, i)) range[i] = -range[i];
    }
    for (int span = 1; span < size; span *= 2) {
      for (int i = 0; i < size; ++i) {
        if ((i & span) != 0) continue;
        const float a = range[i], b = range[i + span];
        range[i] = a + b;
        range[i + span] = a - b;
      }
    }
    for (int i = 0; i < size; ++i) range[i] *= scale;
  }
}

struct Code {
  std::vector<int> levels;
  uint16_t factor;
};

Code CodeOf(const std::vector<float>& value, const std::vector<float>& centre, int bits) {
  const size_t d = value.size();
  std::vector<float> w(d);
  float largest = 0, sum = 0;
  for (size_t i = 0; i < d; ++i) {
    w[i] = value[i] - centre[i];
    largest = std::max(largest, std::abs(w[i]));
  }
  for (float& x : w) {
    x /= largest > 0 ? largest : 1.0f;
    sum = std::fma(x, x, sum);
  }
  const float norm = std::sqrt(largest > 0 ? sum : 1.0f);
  const float inverse = 1.0f / norm;
  for (float& x : w) x *= inverse;
  Turn(w);
  const float scale = std::sqrt(static_cast<float>(d)) / QuantiserStep(bits);
  const float half = static_cast<float>(1 << (bits - 1));
  float dot = 0, square = 0;
  Code code;
  for (const float y : w) {
    const float level = std::clamp(std::floor(y * scale) + half, 0.0f, 2 * half - 1);
    const float t = level - (half - 0.5f);
    dot = std::fma(y, t, dot);
    square = std::fma(t, t, square);
    code.levels.push_back(static_cast<int>(level));
  }
  const float length = largest * norm;
  const float factor = std::min(length * (dot / square), 3.0e38f);
  code.factor = length > 0 && dot > 0 ? reference::ToBFloat16(factor) : uint16_t{0};
  return code;
}

// What a page says about a token, by the description of CodeTiling only.
int LevelAt(const CodeTiling& tiling, const std::vector<std::byte>& page, int slot, int dim) {
  const int row = slot / 32 * 8 + slot % 8;
  const int octet = slot % 32 / 8;
  int level = 0;
  size_t at = static_cast<size_t>(tiling.value_code_offset_bytes()) +
              static_cast<size_t>(row) * 4 * tiling.value_row_words();
  for (int part = 0, below = 0; part < (tiling.value_bits == 3 ? 2 : 1); ++part) {
    const int width = tiling.value_bits == 1 || part == 1 ? 1 : 2;
    const int words = tiling.centre_dims * width / 8;
    uint32_t word;
    std::memcpy(&word, page.data() + at + 4 * static_cast<size_t>(dim % words), 4);
    level |= static_cast<int>(word >> (8 * octet + width * (dim / words)) & ((1u << width) - 1))
             << below;
    at += 4 * static_cast<size_t>(words);
    below += width;
  }
  return level;
}

// Parameters: head_dim, bits of values, dtype.
class GpuValueCodes : public ::testing::TestWithParam<std::tuple<int, int, DType>> {
 protected:
  void SetUp() override { SKIP_WITHOUT_GPU(); }
};

TEST_P(GpuValueCodes, AreThoseOfTheDefinition) {
  const auto [d, bits, dtype] = GetParam();
  constexpr int kHeads = 2, kKeyBits = 3;
  const int64_t tokens = kPages * kPageTokenCount;
  Layer layer(kHeads, d, dtype, tokens, CodeTiling{kKeyBits, (d + 31) / 32, d, bits});
  std::mt19937 random(d + bits);
  const double largest = dtype == DType::kF16 ? 1e3 : 1e6;
  for (int h = 0; h < kHeads; ++h) {
    const std::vector<float> bias = Normals(d, 2, random);
    for (int64_t t = 0; t < tokens; ++t) {
      layer.SetKey(h, t, Normals(d, 1, random));
      // Zeros, values of all sizes, and in head 1 channels that stand out.
      std::vector<float> value =
          t % 40 == 3 ? std::vector<float>(d, 0.0f) : Normals(d, t % 50 == 7 ? largest : 1, random);
      for (int i = 0; i < d && h == 1; ++i) value[i] += bias[i] * (i % 16 == 5 ? 30.0f : 1.0f);
      layer.SetValue(h, t, value);
    }
    // A page of equal values.
    for (int64_t t = 0; t < kPageTokenCount; ++t) {
      layer.SetValue(h, 3 * kPageTokenCount + t, bias);
    }
  }
  layer.Upload();
  const std::vector<float> rotation = MakeRotation(d, 42, 0);
  std::vector<float> transposed(rotation.size());
  for (int i = 0; i < d; ++i) {
    for (int j = 0; j < d; ++j) transposed[i * d + j] = rotation[j * d + i];
  }
  const DeviceArray<float> device_transposed(transposed);
  const RotationWeights weights{kKeyBits, false, device_transposed.data()};
  const DeviceArray<HeadStatistics> statistics{std::vector<HeadStatistics>(kHeads)};
  const DeviceArray<float> centres{std::vector<float>(static_cast<size_t>(kHeads) * d)};
  const HeadIndex heads{statistics.data(), centres.data()};
  const DeviceArray<std::byte> scratch{
      std::vector<std::byte>(static_cast<size_t>(FirstPagesScratchBytes(d)))};
  Check(LaunchEncodeFirstPages(layer.Work(0, 0), weights, heads, scratch.data(),
                               FirstPagesScratchBytes(d), nullptr));
  Check(LaunchEncodePages(layer.Work(kCentreTokenCount, tokens), weights, heads, nullptr));
  const std::vector<std::vector<std::byte>> pages = layer.FetchCodes();
  const CodeTiling& tiling = layer.tiling();
  for (int h = 0; h < kHeads; ++h) {
    for (int64_t p = 0; p < kPages; ++p) {
      const std::vector<std::byte>& page = pages[static_cast<size_t>(h * kPages + p)];
      reference::Vectors values;
      for (int64_t t = 0; t < kPageTokenCount; ++t) {
        values.push_back(layer.Value(h, p * kPageTokenCount + t));
      }
      const std::vector<float> centre = CentreOf(values);
      const auto* const stored =
          reinterpret_cast<const uint16_t*>(page.data() + tiling.value_centre_offset_bytes());
      const auto* const factors =
          reinterpret_cast<const uint16_t*>(page.data() + tiling.value_factor_offset_bytes());
      for (int i = 0; i < d; ++i) {
        ASSERT_EQ(reference::Widened(stored[i]), centre[i]) << "page " << p << " dimension " << i;
      }
      for (int slot = 0; slot < kPageTokenCount; ++slot) {
        const Code code = CodeOf(values[slot], centre, bits);
        const int index = slot / 32 * 32 + slot % 8 * 4 + slot % 32 / 8;
        ASSERT_EQ(factors[index], code.factor) << "page " << p << " slot " << slot;
        for (int i = 0; i < d; ++i) {
          ASSERT_EQ(LevelAt(tiling, page, slot, i), code.levels[i])
              << "page " << p << " slot " << slot << " dimension " << i;
        }
      }
    }
  }
}

INSTANTIATE_TEST_SUITE_P(
    Shapes, GpuValueCodes,
    ::testing::Combine(::testing::Values(16, 64, 80, 128, 144, 256), ::testing::Values(1, 2, 3),
                       ::testing::Values(DType::kF32, DType::kF16, DType::kBF16)),
    [](const auto& info) {
      return "d" + std::to_string(std::get<0>(info.param)) + "b" +
             std::to_string(std::get<1>(info.param)) +
             std::string(DTypeName(std::get<2>(info.param)));
    });

}  // namespace
}  // namespace spillway::cuda
