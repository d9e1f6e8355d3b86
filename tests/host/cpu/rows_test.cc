#include <gtest/gtest.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <limits>
#include <random>
#include <tuple>
#include <vector>

#include "host/cpu/kernels.h"
#include "tests/host/cpu/targets.h"
#include "tests/reference/attention.h"
#include "tests/reference/elements.h"
#include "tests/reference/tail.h"

namespace spillway {
namespace {

// Parameters: head_dim, dtype.
class Rows : public ::testing::TestWithParam<std::tuple<int, DType>> {
 protected:
  static constexpr int kHeads = 5;
  static constexpr float kScale = 0.125f;
  static constexpr int kRows = 3 * kRowBlock + 17;

  Rows() : d_(std::get<0>(GetParam())), dtype_(std::get<1>(GetParam())) {
    std::mt19937 random(d_);
    std::normal_distribution<float> normal;
    std::vector<float> rows(kRows * 2 * d_);
    for (float& x : rows) x = static_cast<float>(reference::Round(dtype_, normal(random)));
    bytes_ = reference::Bytes(dtype_, rows);
    kv_ = {kRows, d_, {}, {}};
    for (int t = 0; t < kRows; ++t) {
      const auto row = rows.begin() + t * 2 * d_;
      kv_.k.insert(kv_.k.end(), row, row + d_);
      kv_.v.insert(kv_.v.end(), row + d_, row + 2 * d_);
    }
    q_.resize(kHeads * d_);
    for (float& x : q_) {
      // Exact in bf16, so that both forms of the queries have the same values.
      x = static_cast<float>(reference::Round(DType::kBF16, 2 * normal(random)));
      scaled_.push_back(x * kScale);
      bf16_.push_back(static_cast<uint16_t>(std::bit_cast<uint32_t>(x) >> 16));
    }
  }

  // Queries in fp32 only, and together with their bf16 form.
  std::vector<RowQueries> QueryForms() const {
    return {{kHeads, d_, kScale, scaled_.data(), nullptr},
            {kHeads, d_, kScale, scaled_.data(), bf16_.data()}};
  }

  const std::byte* Row(int t) const {
    return bytes_.data() + int64_t{t} * 2 * d_ * DTypeBytes(dtype_);
  }
  std::vector<double> Query(int h) const {
    return {q_.begin() + h * d_, q_.begin() + (h + 1) * d_};
  }

  const int d_;
  const DType dtype_;
  std::vector<std::byte> bytes_;
  reference::KeyValues kv_;
  std::vector<float> q_;       // [kHeads][d]
  std::vector<float> scaled_;  // times kScale
  std::vector<uint16_t> bf16_;
};

TEST_P(Rows, FoldsToDenseAttention) {
  // Each head sees another number of rows; the last head sees none.
  const int visible[kHeads] = {kRows, 1, kRowBlock, kRowBlock + 1, 0};
  // The order of sums over lanes differs between instruction sets, so no bits are compared.
  for (const RowQueries& queries : QueryForms())
    SameOnEveryTarget([&](std::vector<std::byte>&) {
      std::vector<RowSums> sums(kHeads);
      std::vector<float> value(kHeads * d_, 0.0f), logits(kHeads * kRowBlock);
      for (int at = 0; at < kRows; at += kRowBlock) {
        const int count = std::min(kRowBlock, kRows - at);
        const std::byte* rows[kRowBlock];
        for (int i = 0; i < count; ++i) rows[i] = Row(at + i);
        ASSERT_TRUE(RowLogits(dtype_, rows, nullptr, count, queries, logits.data()));
        int counts[kHeads];
        for (int h = 0; h < kHeads; ++h) {
          counts[h] = std::clamp(visible[h] - at, 0, count);
          for (int i = 0; i < count; ++i) {
            ASSERT_NEAR(logits[h * kRowBlock + i],
                        kScale * reference::Dot(Query(h), kv_.Key(at + i)), 2e-5);
          }
        }
        FoldRows(dtype_, rows, nullptr, count, counts, kHeads, d_, logits.data(), sums.data(),
                 {.value = value.data()});
      }
      for (int h = 0; h < kHeads; ++h) {
        ASSERT_EQ(sums[h].count, visible[h]);
        if (visible[h] == 0) continue;
        const reference::Attention wanted =
            reference::DenseAttention(kv_, Query(h), kScale, visible[h]);
        std::vector<float> out(d_);
        for (int i = 0; i < d_; ++i) out[i] = value[h * d_ + i] / sums[h].sum;
        EXPECT_LT(reference::RelativeDistance(out, wanted.out), 2e-6) << h;
        EXPECT_NEAR(sums[h].max + std::log(sums[h].sum), wanted.lse, 1e-5) << h;
      }
    });
}

// Values are counted in a unit, here 1/4.
TEST_P(Rows, MomentsMatchTwoPasses) {
  constexpr float kInverseUnit = 4;
  std::vector<float> signs(d_);
  for (int i = 0; i < d_; ++i) signs[i] = i * 11 % 7 < 3 ? -1.0f : 1.0f;
  reference::KeyValues kv = kv_;
  for (double& v : kv.v) v *= kInverseUnit;
  for (const RowQueries& queries : QueryForms())
    SameOnEveryTarget([&](std::vector<std::byte>&) {
      std::vector<RowSums> sums(kHeads);
      std::vector<float> value(kHeads * d_, 0.0f), value_sq(kHeads * d_, 0.0f);
      std::vector<float> projected(kHeads * kProjectionEntries, 0.0f);
      std::vector<float> logits(kHeads * kRowBlock);
      std::vector<uint32_t> tokens;
      for (int at = 0; at < kRows; at += kRowBlock) {
        const int count = std::min(kRowBlock, kRows - at);
        const std::byte* rows[kRowBlock];
        for (int i = 0; i < count; ++i) {
          rows[i] = Row(at + i);
          tokens.push_back(at + i);
        }
        ASSERT_TRUE(RowLogits(dtype_, rows, nullptr, count, queries, logits.data()));
        FoldRows(dtype_, rows, nullptr, count, nullptr, kHeads, d_, logits.data(), sums.data(),
                 {.inverse_unit = kInverseUnit,
                  .value = value.data(),
                  .value_sq = value_sq.data(),
                  .projected = projected.data(),
                  .signs = signs.data()});
      }
      for (int h = 0; h < kHeads; ++h) {
        const std::vector<double> l = reference::Logits(kv_, Query(h), kScale, kRows);
        double sum = 0, sum_sq = 0, norm = 0;
        std::vector<double> first(d_), second(d_), products(kProjectionEntries);
        for (uint32_t t : tokens) {
          const double x = std::exp(l[t] - sums[h].max);
          sum += x;
          sum_sq += x * x;
          norm += x * x * reference::Dot(kv.Value(t), kv.Value(t));
          std::vector<double> y(kProjectionDims);
          for (int i = 0; i < d_; ++i) {
            first[i] += x * kv.Value(t)[i];
            second[i] += x * x * kv.Value(t)[i];
            y[i % kProjectionDims] += signs[i] * kv.Value(t)[i];
          }
          for (int i = 0; i < kProjectionEntries; ++i) {
            products[i] += x * x * y[i / kProjectionDims] * y[i % kProjectionDims];
          }
        }
        EXPECT_NEAR(sums[h].sum, sum, 1e-5 * sum);
        EXPECT_NEAR(sums[h].sum_sq, sum_sq, 1e-5 * sum_sq);
        EXPECT_NEAR(sums[h].sum_sq_norm, norm, 1e-5 * norm);
        for (int i = 0; i < d_; ++i) {
          EXPECT_NEAR(value[h * d_ + i], first[i], 4e-5 * sum);
          EXPECT_NEAR(value_sq[h * d_ + i], second[i], 4e-5 * sum_sq);
        }
        for (int i = 0; i < kProjectionEntries; ++i) {
          EXPECT_NEAR(projected[h * kProjectionEntries + i], products[i], 1e-5 * norm);
        }
      }
    });
}

// Counted in a unit of their own size, values of any size in fp32 have finite sums and squares.
TEST(FoldRows, UnitsKeepSquaresInRange) {
  constexpr int kD = 32, kRows = 20;
  std::mt19937 random(6);
  std::normal_distribution<float> normal;
  std::vector<float> signs(kD, 1.0f);
  std::vector<float> base(kRows * 2 * kD);
  for (float& x : base) x = normal(random);
  SameOnEveryTarget([&](std::vector<std::byte>&) {
    std::vector<float> plain;
    for (const int exponent : {0, -100, 100}) {
      std::vector<float> rows = base;
      const std::byte* pointers[kRows];
      for (int r = 0; r < kRows; ++r) {
        for (int i = 0; i < kD; ++i) {
          rows[(2 * r + 1) * kD + i] = std::ldexp(rows[(2 * r + 1) * kD + i], exponent);
        }
        pointers[r] = reinterpret_cast<const std::byte*>(rows.data() + 2 * r * kD);
      }
      std::vector<RowSums> sums(1);
      std::vector<float> all(2 * kD + kProjectionEntries, 0.0f), logits(kRowBlock);
      for (int r = 0; r < kRows; ++r) logits[r] = 0.3f * static_cast<float>(r);
      FoldRows(DType::kF32, pointers, nullptr, kRows, nullptr, 1, kD, logits.data(), sums.data(),
               {.inverse_unit = std::ldexp(1.0f, -exponent),
                .value = all.data(),
                .value_sq = all.data() + kD,
                .projected = all.data() + 2 * kD,
                .signs = signs.data()});
      all.push_back(sums[0].sum_sq_norm);
      if (exponent == 0) plain = all;
      // Powers of two change no digit of the sums.
      EXPECT_EQ(all, plain) << exponent;
    }
  });
}

INSTANTIATE_TEST_SUITE_P(Shapes, Rows,
                         ::testing::Combine(::testing::Values(16, 64, 80, 96, 128, 256),
                                            ::testing::Values(DType::kF32, DType::kF16,
                                                              DType::kBF16)),
                         [](const auto& info) {
                           return "d" + std::to_string(std::get<0>(info.param)) +
                                  std::string(DTypeName(std::get<1>(info.param)));
                         });

TEST(RowLogits, TellsOfALogitThatIsNotFinite) {
  constexpr int kD = 64;
  std::vector<float> rows(2 * kD * 5, 1.0f), q(2 * kD, 1e20f);
  std::fill_n(q.begin(), kD, 1.0f);
  for (const bool second_head : {false, true}) {
    std::fill_n(rows.begin() + 3 * 2 * kD, kD, second_head ? 1e19f : 1.0f);
    const std::byte* pointers[5];
    for (int i = 0; i < 5; ++i) {
      pointers[i] = reinterpret_cast<const std::byte*>(rows.data() + i * 2 * kD);
    }
    SameOnEveryTarget([&](std::vector<std::byte>&) {
      float logits[2 * kRowBlock];
      const RowQueries queries{2, kD, 1, q.data(), nullptr};
      EXPECT_EQ(RowLogits(DType::kF32, pointers, nullptr, 5, queries, logits), !second_head);
      EXPECT_EQ(std::isfinite(logits[kRowBlock + 3]), !second_head);
      EXPECT_TRUE(std::isfinite(logits[3]));
    });
  }
}

}  // namespace
}  // namespace spillway
