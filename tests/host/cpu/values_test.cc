// Kernels of value codes, on every instruction set, against their definitions.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <random>
#include <string>
#include <tuple>
#include <vector>

#include "host/base/elements.h"
#include "host/core/value_code.h"
#include "host/cpu/page_encoder.h"
#include "tests/host/cpu/targets.h"
#include "tests/reference/elements.h"
#include "tests/reference/tail.h"
#include "tests/reference/value_codes.h"

namespace spillway {
namespace {

// Parameters: head_dim, value_bits.
class Values : public ::testing::TestWithParam<std::tuple<int, int>> {
 protected:
  Values() : d_(std::get<0>(GetParam())), signs_(HadamardSigns::Of(d_)) {
    spec_.head_dim = d_;
    spec_.dtype = DType::kBF16;
    spec_.hash = {.kind = HashKind::kRotation, .value_bits = std::get<1>(GetParam())};
    layout_ = CodeLayout::Of(spec_);
    std::mt19937 random(d_ + layout_.value_bits);
    std::normal_distribution<float> normal;
    std::vector<float> rows(kPageTokenCount * 2 * d_);
    // About a mean, and of different lengths.
    for (int t = 0; t < kPageTokenCount; ++t) {
      for (int i = 0; i < 2 * d_; ++i) {
        rows[t * 2 * d_ + i] = static_cast<float>(reference::Round(
            DType::kBF16, 3 + normal(random) * std::exp2(static_cast<float>(t % 7 - 3))));
      }
    }
    rows_ = reference::Bytes(DType::kBF16, rows);
    kv_ = {kPageTokenCount, d_, {}, {}};
    for (int t = 0; t < kPageTokenCount; ++t) {
      const auto row = rows.begin() + t * 2 * d_;
      kv_.k.insert(kv_.k.end(), row, row + d_);
      kv_.v.insert(kv_.v.end(), row + d_, row + 2 * d_);
    }
  }

  std::vector<std::byte> Encode() const {
    std::vector<std::byte> page(layout_.page_bytes());
    EncodeParams params;
    params.layout = layout_;
    params.signs = &signs_;
    EncodeValues(spec_, params, MeasureValues(spec_, rows_.data()), rows_.data(), page.data());
    return page;
  }
  // u of a token's dimension, read by the description of the layout: groups of four tokens, parts
  // of 2 and 1 bits, byte b of a word is token b, dimension p * words + j is field p of word j.
  int CodeOf(const std::vector<std::byte>& page, int t, int dimension) const {
    int code = 0, low = 0;
    const int bits = layout_.value_bits;
    const auto* word =
        reinterpret_cast<const uint32_t*>(page.data() + layout_.value_code_offset_bytes()) +
        t / 4 * (d_ * bits / 8);
    for (int width : bits == 3 ? std::vector<int>{2, 1} : std::vector<int>{bits}) {
      const int words = d_ * width / 8;
      const uint32_t field = word[dimension % words] >> (8 * (t % 4) + width * (dimension / words));
      code |= static_cast<int>(field & ((1u << width) - 1)) << low;
      low += width;
      word += words;
    }
    return code;
  }
  float FactorOf(const std::vector<std::byte>& page, int t) const {
    float f;
    ToFloat(DType::kBF16, page.data() + layout_.value_factor_offset_bytes() + 2 * t, 1, &f);
    return f;
  }
  std::vector<uint8_t> Levels(int heads) const {
    std::vector<uint8_t> levels(heads * kPageTokenCount);
    for (size_t i = 0; i < levels.size(); ++i) {
      levels[i] = i % 5 == 2 ? 0 : static_cast<uint8_t>(150 + i * 37 % 60);
    }
    return levels;
  }

  const int d_;
  const HadamardSigns signs_;
  ModelSpec spec_;
  CodeLayout layout_;
  std::vector<std::byte> rows_;
  reference::KeyValues kv_;
};

// The codes are those of the definition, but for coordinates at a border between two.
TEST_P(Values, EncodesByTheDefinition) {
  const std::vector<std::byte> bytes =
      SameOnEveryTarget([&](std::vector<std::byte>& out) { AppendBytes(Encode(), out); });
  std::vector<float> centre(d_);
  ToFloat(DType::kBF16, bytes.data() + layout_.value_centre_offset_bytes(), d_, centre.data());
  const std::vector<double> wide(centre.begin(), centre.end());
  const std::vector<double> transform = reference::ValueTransform(d_);
  const double middle = ((1 << layout_.value_bits) - 1) / 2.0;
  for (int t = 0; t < kPageTokenCount; ++t) {
    const reference::ValueCode code =
        reference::EncodeValue(kv_.Value(t), wide, transform, layout_.value_bits);
    EXPECT_NEAR(FactorOf(bytes, t), code.factor, 0.01 * code.factor) << t;
    for (int i = 0; i < d_; ++i) {
      double level = middle;
      for (int j = 0; j < d_; ++j) level += transform[i * d_ + j] * code.direction[j];
      const double border = std::fabs(code.steps[i] - std::nearbyint(code.steps[i]));
      if (border > 1e-5) EXPECT_EQ(CodeOf(bytes, t, i), std::lround(level)) << t << " " << i;
    }
  }
  // What the page's codes say of its values is nearer to them than the centre is.
  constexpr double kDistortion[] = {0.3634, 0.1188, 0.03744};
  double squares = 0, errors = 0;
  std::vector<float> code(kHeadDimMax + 16);
  for (int t = 0; t < kPageTokenCount; ++t) {
    DecodeValue(layout_, signs_, bytes.data(), t, code.data());
    for (int i = 0; i < d_; ++i) {
      const double w = kv_.Value(t)[i] - wide[i];
      squares += w * w;
      errors += std::pow(w - double{FactorOf(bytes, t)} * code[i], 2);
    }
  }
  EXPECT_LT(errors / squares, 1.1 * kDistortion[layout_.value_bits - 1]);
}

TEST_P(Values, DecodesWhatWasEncoded) {
  const std::vector<std::byte> page = Encode();
  const std::vector<double> transform = reference::ValueTransform(d_);
  const double middle = ((1 << layout_.value_bits) - 1) / 2.0;
  for (const int t : {0, 1, 2, 3, 64, 126, 127}) {
    std::vector<float> code(kHeadDimMax + 16);
    const std::vector<std::byte> bytes = SameOnEveryTarget([&](std::vector<std::byte>& out) {
      DecodeValue(layout_, signs_, page.data(), t, code.data());
      AppendBytes(std::vector<float>(code.begin(), code.begin() + d_), out);
    });
    for (int i = 0; i < d_; ++i) {
      double wanted = 0;  // H^T t
      for (int j = 0; j < d_; ++j) wanted += transform[j * d_ + i] * (CodeOf(page, t, j) - middle);
      ASSERT_NEAR(code[i], wanted, 2e-6 * d_) << "token " << t << " dimension " << i;
    }
  }
}

TEST_P(Values, SumsCodesExactly) {
  const std::vector<std::byte> page = Encode();
  for (const int heads : {1, 2, 5}) {
    const std::vector<uint8_t> levels = Levels(heads);
    std::vector<int8_t> weights(levels.size());
    std::vector<int32_t> sums(static_cast<size_t>(heads) * d_);
    SameOnEveryTarget([&](std::vector<std::byte>& out) {
      std::vector<float> totals;
      for (int h = 0; h < heads; ++h) {
        const uint8_t* of_head = levels.data() + h * kPageTokenCount;
        const std::byte* factors = page.data() + layout_.value_factor_offset_bytes();
        const PageWeights w = WeighPage(of_head, factors);
        const int sum =
            CodeWeights(of_head, factors, w.largest, weights.data() + h * kPageTokenCount);
        totals.insert(totals.end(), {w.sum, w.largest, static_cast<float>(sum)});
      }
      std::fill(sums.begin(), sums.end(), 7);  // they add
      SumValueCodes(layout_, page.data(), weights.data(), heads, sums.data());
      AppendBytes(totals, out);
      AppendBytes(weights, out);
      AppendBytes(sums, out);
    });
    for (int h = 0; h < heads; ++h) {
      double largest = 0, sum = 0;
      for (int t = 0; t < kPageTokenCount; ++t) {
        const double x = LevelWeight(levels[h * kPageTokenCount + t]);
        sum += x;
        largest = std::max(largest, x * FactorOf(page, t));
      }
      const PageWeights w = WeighPage(levels.data() + h * kPageTokenCount,
                                      page.data() + layout_.value_factor_offset_bytes());
      EXPECT_NEAR(w.sum, sum, 1e-5 * sum);
      EXPECT_FLOAT_EQ(w.largest, static_cast<float>(largest));
      for (int i = 0; i < d_; ++i) {
        int64_t wanted = 7;
        for (int t = 0; t < kPageTokenCount; ++t) {
          wanted += int64_t{weights[h * kPageTokenCount + t]} * CodeOf(page, t, i);
        }
        ASSERT_EQ(sums[h * d_ + i], wanted) << "head " << h << " dimension " << i;
      }
      for (int t = 0; t < kPageTokenCount; ++t) {
        const double share =
            LevelWeight(levels[h * kPageTokenCount + t]) * FactorOf(page, t) / largest;
        ASSERT_NEAR(weights[h * kPageTokenCount + t], 127 * share, 0.501);
      }
    }
  }
}

// Rows of three blocks: the sums of x v - x^ v^ and their moments. Head 1 has codes far above the
// logits, head 2 far below, and head 3 none.
TEST_P(Values, FoldsResiduals) {
  constexpr int kHeads = 4;
  constexpr int kRows = 2 * kRowBlock + 5;
  const std::vector<std::byte> page = Encode();
  std::mt19937 random(3);
  std::normal_distribution<float> normal;
  const float references[kHeads] = {4, 60, -60, 1};
  reference::CodeTerms codes[kHeads];
  std::vector<double> logits[kHeads];
  std::vector<float> code(kHeadDimMax + 16), centre(d_), signs(d_);
  ToFloat(DType::kBF16, page.data() + layout_.value_centre_offset_bytes(), d_, centre.data());
  for (int i = 0; i < d_; ++i) signs[i] = i * 7 % 5 < 2 ? -1.0f : 1.0f;
  const std::vector<uint8_t> levels = Levels(kHeads);
  std::vector<float> code_weights(levels.size());
  for (int h = 0; h < kHeads; ++h) {
    codes[h].reference = references[h] * std::log(2.0);
    codes[h].weights.assign(kPageTokenCount, 0.0);
    codes[h].values.resize(kPageTokenCount);
    for (int t = 0; t < kPageTokenCount; ++t) {
      logits[h].push_back(normal(random));
      if (h == 3) continue;
      const double x = LevelWeight(levels[h * kPageTokenCount + t]);
      code_weights[h * kPageTokenCount + t] = static_cast<float>(0.9 * x * FactorOf(page, t));
      DecodeValue(layout_, signs_, page.data(), t, code.data());
      codes[h].weights[t] = x;
      for (int i = 0; i < d_; ++i) {
        codes[h].values[t].push_back(x * centre[i] +
                                     double{code_weights[h * kPageTokenCount + t]} * code[i]);
      }
    }
  }
  std::vector<uint32_t> tokens;
  for (int r = 0; r < kRows; ++r) tokens.push_back(r * 11 % kPageTokenCount);
  const float unit = 0.5f;
  SameOnEveryTarget([&](std::vector<std::byte>&) {
    std::vector<RowSums> sums(kHeads);
    std::vector<float> value(kHeads * d_), value_sq(kHeads * d_);
    std::vector<float> projected(kHeads * kProjectionEntries);
    for (int at = 0; at < kRows; at += kRowBlock) {
      const int count = std::min(kRowBlock, kRows - at);
      std::vector<float> of_block(kHeads * kRowBlock), weights(kHeads * kRowBlock);
      std::vector<uint8_t> of_levels(kHeads * kRowBlock);
      std::vector<float> centres(kRowBlock * d_), decoded(kRowBlock * kHeadDimMax + 16);
      const std::byte* rows[kRowBlock];
      for (int r = 0; r < count; ++r) {
        const uint32_t t = tokens[at + r];
        rows[r] = rows_.data() + t * spec_.row_bytes();
        for (int i = 0; i < d_; ++i) centres[r * d_ + i] = centre[i] / unit;
        DecodeValue(layout_, signs_, page.data(), static_cast<int>(t),
                    decoded.data() + r * kHeadDimMax);
        for (int h = 0; h < kHeads; ++h) {
          of_block[h * kRowBlock + r] = static_cast<float>(logits[h][t]);
          of_levels[h * kRowBlock + r] = h == 3 ? 0 : levels[h * kPageTokenCount + t];
          weights[h * kRowBlock + r] = code_weights[h * kPageTokenCount + t] / unit;
        }
      }
      FoldResiduals(DType::kBF16, rows, count, kHeads, d_, of_block.data(),
                    {of_levels.data(), weights.data(), references, centres.data(), decoded.data()},
                    sums.data(),
                    {.inverse_unit = 1 / unit,
                     .value = value.data(),
                     .value_sq = value_sq.data(),
                     .projected = projected.data(),
                     .signs = signs.data()});
    }
    for (int h = 0; h < kHeads; ++h) {
      EXPECT_EQ(sums[h].count, kRows);
      double sum = 0, sum_sq = 0, norms = 0;
      std::vector<double> first(d_), second(d_), outer(kProjectionEntries);
      for (const uint32_t t : tokens) {
        const double scale = std::exp(codes[h].reference - sums[h].max);
        const double x = std::exp(static_cast<float>(logits[h][t]) - sums[h].max);
        const double b = x - scale * codes[h].weights[t];
        sum += b;
        sum_sq += b * b;
        std::vector<double> y(kProjectionDims);
        for (int i = 0; i < d_; ++i) {
          const double v = h == 3 ? 0 : scale * codes[h].values[t][i];
          const double a = (x * kv_.Value(t)[i] - v) / unit;
          norms += a * a;
          first[i] += a;
          second[i] += b * a;
          y[i % kProjectionDims] += signs[i] * a;
        }
        for (int i = 0; i < kProjectionEntries; ++i) {
          outer[i] += y[i / kProjectionDims] * y[i % kProjectionDims];
        }
      }
      const double size = std::sqrt(norms * kRows);
      EXPECT_NEAR(sums[h].sum, sum, 1e-4 * std::sqrt(sum_sq * kRows)) << h;
      EXPECT_NEAR(sums[h].sum_sq, sum_sq, 1e-4 * sum_sq) << h;
      EXPECT_NEAR(sums[h].sum_sq_norm, norms, 1e-4 * norms) << h;
      for (int i = 0; i < d_; ++i) {
        ASSERT_NEAR(value[h * d_ + i], first[i], 1e-4 * size) << h << " dimension " << i;
        ASSERT_NEAR(value_sq[h * d_ + i], second[i], 1e-4 * std::sqrt(sum_sq * norms)) << h;
      }
      for (int i = 0; i < kProjectionEntries; ++i) {
        ASSERT_NEAR(projected[h * kProjectionEntries + i], outer[i], 2e-3 * norms) << h;
      }
    }
  });
}

INSTANTIATE_TEST_SUITE_P(Shapes, Values,
                         ::testing::Combine(::testing::Values(16, 48, 64, 80, 128, 256),
                                            ::testing::Values(1, 2, 3)),
                         [](const auto& info) {
                           return "d" + std::to_string(std::get<0>(info.param)) + "bits" +
                                  std::to_string(std::get<1>(info.param));
                         });

}  // namespace
}  // namespace spillway
