// Codes of values (host/core/value_code.h): their sums over a page, single codes, and the fold of
// sampled rows whose estimates by codes are subtracted.
#include <algorithm>
#include <cmath>
#include <cstring>

#include "host/core/value_code.h"
#include "host/cpu/kernels.h"

#define HWY_DISABLED_TARGETS (HWY_SSSE3 | HWY_SSE4)
#define HWY_WANT_AVX3_DL
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "host/cpu/kernels_values.cc"
#include "hwy/foreach_target.h"
//
#include "host/cpu/code_products-inl.h"
#include "host/cpu/simd_math-inl.h"
#include "hwy/highway.h"

HWY_BEFORE_NAMESPACE();
namespace spillway {
namespace HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

// LevelWeight() of each lane.
HWY_INLINE VF LevelWeights(VU level) {
  const DF df;
  const DI di;
  const DU du;
  const auto quarter = hn::And(level, hn::Set(du, 3u));
  const auto is = [&](uint32_t q) { return hn::RebindMask(df, hn::Eq(quarter, hn::Set(du, q))); };
  auto mantissa = hn::Set(df, LevelWeight(kLevelZero));
  mantissa = hn::IfThenElse(is(1), hn::Set(df, LevelWeight(kLevelZero + 1)), mantissa);
  mantissa = hn::IfThenElse(is(2), hn::Set(df, LevelWeight(kLevelZero + 2)), mantissa);
  mantissa = hn::IfThenElse(is(3), hn::Set(df, LevelWeight(kLevelZero + 3)), mantissa);
  const auto exponent = hn::Sub(hn::BitCast(di, hn::ShiftRight<2>(level)),
                                hn::Set(di, kLevelZero / kLevelsPerOctave));
  const auto weight =
      hn::BitCast(df, hn::Add(hn::BitCast(di, mantissa), hn::ShiftLeft<23>(exponent)));
  return hn::IfThenZeroElse(hn::RebindMask(df, hn::Eq(level, hn::Zero(du))), weight);
}

HWY_INLINE VU LoadLevels(const uint8_t* levels) {
  const DU du;
  return hn::PromoteTo(du, hn::LoadU(hn::Rebind<uint8_t, DU>(), levels));
}

PageWeights WeighPageImpl(const uint8_t* levels, const std::byte* value_factors) {
  const DF df;
  const hn::Rebind<hwy::bfloat16_t, DF> db;
  const int n = static_cast<int>(hn::Lanes(df));
  const auto* factors = reinterpret_cast<const hwy::bfloat16_t*>(value_factors);
  HWY_ALIGN float chains[kRankChains];
  auto largest = hn::Zero(df);
  for (int lane = 0; lane < kRankChains; lane += n) {
    auto sum = hn::Zero(df);
    for (int i = lane; i < kPageTokenCount; i += kRankChains) {
      const auto weight = LevelWeights(LoadLevels(levels + i));
      const auto factor = hn::PromoteTo(df, hn::LoadU(db, factors + i));
      sum = hn::Add(sum, weight);
      largest = hn::Max(largest, hn::Mul(weight, factor));
    }
    hn::Store(sum, df, chains + lane);
  }
  return {SumChains(chains), hn::GetLane(hn::MaxOfLanes(df, largest))};
}

int CodeWeightsImpl(const uint8_t* levels, const std::byte* value_factors, float largest,
                    int8_t* weights) {
  const DF df;
  const DI di;
  const hn::Rebind<hwy::bfloat16_t, DF> db;
  const hn::Rebind<int8_t, DI> d8;
  const int n = static_cast<int>(hn::Lanes(df));
  const auto* factors = reinterpret_cast<const hwy::bfloat16_t*>(value_factors);
  if (!HasCodeWeights(largest)) {
    std::fill_n(weights, kPageTokenCount, int8_t{0});
    return 0;
  }
  const auto inverse = hn::Set(df, CodeWeightInverse(largest));
  const auto most = hn::Set(df, static_cast<float>(kCodeWeightMax));
  auto sum = hn::Zero(di);
  for (int i = 0; i < kPageTokenCount; i += n) {
    const auto product = hn::Mul(LevelWeights(LoadLevels(levels + i)),
                                 hn::PromoteTo(df, hn::LoadU(db, factors + i)));
    const auto weight = hn::NearestInt(hn::Min(hn::Mul(product, inverse), most));
    sum = hn::Add(sum, weight);
    hn::StoreU(hn::DemoteTo(d8, weight), d8, weights + i);
  }
  return hn::GetLane(hn::SumOfLanes(di, sum));
}

// Adds the sums of one part of a page's codes for kRows heads to sums [head][head_dim].
template <int kWidth, int kRows>
HWY_INLINE void SumPart(const CodeLayout& layout, int part, const uint32_t* codes,
                        const int8_t* weights, int below, int32_t* sums) {
  const DI di;
  const DU du;
  constexpr int kPositions = 8 / kWidth;
  const int n = static_cast<int>(hn::Lanes(du));
  const int words = layout.value_words(part);
  const int group_words = layout.value_group_words();
  const auto mask = hn::Set(du, ((1u << kWidth) - 1) * uint32_t{0x01010101u});
  for (int j = 0; j < words; j += n) {
    VI acc[kPositions][kRows];
    for (int p = 0; p < kPositions; ++p) {
      for (int r = 0; r < kRows; ++r) acc[p][r] = hn::Zero(di);
    }
    // Loads beyond the last word of a part stay within the page; their lanes are not stored.
    const uint32_t* at = codes + (part == 0 ? 0 : layout.value_words(0)) + j;
    for (int group = 0; group < kValueGroupsPerPage; ++group, at += group_words) {
      const auto word = hn::LoadU(du, at);
      int32_t weight[kRows];
      for (int r = 0; r < kRows; ++r) {
        std::memcpy(&weight[r], weights + r * kPageTokenCount + group * kValueGroupTokens, 4);
      }
#pragma GCC unroll 8
      for (int p = 0; p < kPositions; ++p) {
        const auto fields = hn::And(hn::ShiftRightSame(word, kWidth * p), mask);
        for (int r = 0; r < kRows; ++r) acc[p][r] = DotBytes(acc[p][r], fields, weight[r]);
      }
    }
    const int lanes = std::min(n, words - j);
    for (int p = 0; p < kPositions; ++p) {
      for (int r = 0; r < kRows; ++r) {
        HWY_ALIGN int32_t out[16];
        hn::Store(acc[p][r], di, out);
        int32_t* const to = sums + r * layout.centre_dims + p * words + j;
        for (int i = 0; i < lanes; ++i) to[i] += out[i] << below;
      }
    }
  }
}

template <int kRows>
void SumRows(const CodeLayout& layout, const uint32_t* codes, const int8_t* weights,
             int32_t* sums) {
  if (layout.value_bits == 1) return SumPart<1, kRows>(layout, 0, codes, weights, 0, sums);
  SumPart<2, kRows>(layout, 0, codes, weights, 0, sums);
  if (layout.value_bits == 3) SumPart<1, kRows>(layout, 1, codes, weights, 2, sums);
}

void SumValueCodesImpl(const CodeLayout& layout, const std::byte* page, const int8_t* weights,
                       int head_count, int32_t* sums) {
  const auto* codes = reinterpret_cast<const uint32_t*>(page + layout.value_code_offset_bytes());
  for (int h = 0; h < head_count; h += 2) {
    const int8_t* of_heads = weights + h * kPageTokenCount;
    int32_t* const to = sums + h * layout.centre_dims;
    if (h + 1 < head_count) {
      SumRows<2>(layout, codes, of_heads, to);
    } else {
      SumRows<1>(layout, codes, of_heads, to);
    }
  }
}

float AddCentreImpl(const std::byte* centre, int dim, float inverse_unit, const float* weights,
                    int head_count, float* sums) {
  const DF df;
  const hn::Rebind<hwy::bfloat16_t, DF> db;
  const int n = static_cast<int>(hn::Lanes(df));
  const auto* at = reinterpret_cast<const hwy::bfloat16_t*>(centre);
  auto square = hn::Zero(df);
  for (int i = 0; i < dim; i += n) {
    const auto c = hn::Mul(hn::PromoteTo(df, hn::LoadU(db, at + i)), hn::Set(df, inverse_unit));
    square = hn::MulAdd(c, c, square);
    for (int h = 0; h < head_count; ++h) {
      float* const to = sums + h * dim + i;
      hn::StoreU(hn::MulAdd(c, hn::Set(df, weights[h]), hn::LoadU(df, to)), df, to);
    }
  }
  return hn::GetLane(hn::SumOfLanes(df, square));
}

void AddProductsImpl(const int32_t* products, int dim, int32_t offset, float unit, float* sums) {
  const DF df;
  const DI di;
  const int n = static_cast<int>(hn::Lanes(df));
  for (int i = 0; i < dim; i += n) {
    const auto p = hn::LoadU(di, products + i);
    const auto twice = hn::ConvertTo(df, hn::Sub(hn::Add(p, p), hn::Set(di, offset)));
    hn::StoreU(hn::MulAdd(twice, hn::Set(df, unit), hn::LoadU(df, sums + i)), df, sums + i);
  }
}

// The last transform of H^T of a row: that of a range of `size` entries, in place, without its
// scale and signs.
HWY_INLINE void Butterflies(int size, float* x) {
  const DF df;
  const DI di;
  const int n = static_cast<int>(hn::Lanes(df));
  for (int span = 1; span < n; span *= 2) {
    HWY_ALIGN int32_t partner[16];
    HWY_ALIGN float sign[16];
    for (int i = 0; i < n; ++i) {
      partner[i] = i ^ span;
      sign[i] = (i & span) != 0 ? -1.0f : 1.0f;
    }
    const auto indices = hn::IndicesFromVec(df, hn::Load(di, partner));
    const auto signs = hn::Load(df, sign);
    for (int i = 0; i < size; i += n) {
      const auto v = hn::LoadU(df, x + i);
      hn::StoreU(hn::MulAdd(v, signs, hn::TableLookupLanes(v, indices)), df, x + i);
    }
  }
  for (int span = n; span < size; span *= 2) {
    for (int first = 0; first < size; first += 2 * span) {
      for (int i = first; i < first + span; i += n) {
        const auto a = hn::LoadU(df, x + i);
        const auto b = hn::LoadU(df, x + i + span);
        hn::StoreU(hn::Add(a, b), df, x + i);
        hn::StoreU(hn::Sub(a, b), df, x + i + span);
      }
    }
  }
}

void UndoHadamardImpl(const HadamardSigns& signs, int dim, float* x) {
  const DF df;
  const int n = static_cast<int>(hn::Lanes(df));
  const int size = HadamardSize(dim);
  const auto scale = hn::Set(df, HadamardScale(dim));
  for (int part = HadamardCount(dim) - 1; part >= 0; --part) {
    float* const range = x + (part == 0 ? 0 : dim - size);
    Butterflies(size, range);
    for (int i = 0; i < size; i += n) {
      const auto v = hn::Mul(hn::LoadU(df, range + i), scale);
      hn::StoreU(hn::Mul(v, hn::LoadU(df, signs.of[part] + i)), df, range + i);
    }
  }
}

void DecodeValueImpl(const CodeLayout& layout, const HadamardSigns& signs, const std::byte* page,
                     int slot, float* code) {
  const DF df;
  const DI di;
  const DU du;
  const int n = static_cast<int>(hn::Lanes(df));
  const int dim = layout.centre_dims;
  const auto* group = reinterpret_cast<const uint32_t*>(page + layout.value_code_offset_bytes()) +
                      slot / kValueGroupTokens * layout.value_group_words();
  const int byte = 8 * (slot % kValueGroupTokens);
  const float middle = 0.5f * static_cast<float>((1 << layout.value_bits) - 1);
  for (int part = 0, below = 0; part < layout.value_parts(); ++part) {
    const int width = layout.value_width(part);
    const int words = layout.value_words(part);
    const auto mask = hn::Set(du, (1u << width) - 1);
    for (int p = 0; p < 8 / width; ++p) {
      for (int j = 0; j < words; j += n) {
        // Whole vectors: what is beyond the part's last word is overwritten by the next position,
        // is 0, or lies beyond the vector's end.
        auto u = hn::ShiftRightSame(hn::LoadU(du, group + j), byte + width * p);
        u = hn::ShiftLeftSame(hn::And(u, mask), below);
        float* const out = code + p * words + j;
        const auto value =
            hn::IfThenElseZero(hn::FirstN(df, words - j), hn::ConvertTo(df, hn::BitCast(di, u)));
        hn::StoreU(
            part == 0 ? hn::Sub(value, hn::Set(df, middle)) : hn::Add(hn::LoadU(df, out), value),
            df, out);
      }
    }
    group += words;
    below += width;
  }
  UndoHadamardImpl(signs, dim, code);
}

// x and x^ of the rows of a block for one head, in units of exp(max), and g x^ as rounded for
// codes.
struct ResidualWeights {
  HWY_ALIGN float x[kRowBlock];
  HWY_ALIGN float estimate[kRowBlock];
  HWY_ALIGN float code[kRowBlock];
  float keep;  // the factor of the head's earlier sums
};

HWY_INLINE void WeighResiduals(const float* logits, const uint8_t* levels, const float* codes,
                               float reference, int count, RowSums* sums, ResidualWeights& w) {
  float max = sums->max;
  for (int r = 0; r < count; ++r) {
    max = std::max(max, logits[r]);
    if (levels[r] != 0) max = std::max(max, LevelLogit(levels[r], reference));
  }
  // If a row has a level, the reference is at most kLevelZero / kLevelsPerOctave octaves above max.
  constexpr float kAboveMax = 40.0f;
  const float unit = ExpF32(std::min(LevelLogit(kLevelZero, reference) - max, kAboveMax));
  float sum = 0, sum_sq = 0;
  for (int r = 0; r < count; ++r) {
    w.x[r] = ExpF32(logits[r] - max);
    w.estimate[r] = LevelWeight(levels[r]) * unit;
    w.code[r] = codes[r] * unit;
    const float residual = w.x[r] - w.estimate[r];
    sum += residual;
    sum_sq = std::fma(residual, residual, sum_sq);
  }
  sums->count += count;
  w.keep = sums->Merge({max, sum, sum_sq, 0.0f}).keep;
}

template <typename T>
void FoldResidualsOf(const std::byte* const* rows, int count, int head_count, int dim,
                     const float* logits, const ResidualRows& residual, RowSums* sums,
                     const ValueSums& values) {
  const DF df;
  const int n = static_cast<int>(hn::Lanes(df));
  const auto unit = hn::Set(df, values.inverse_unit);
  for (int h = 0; h < head_count; ++h) {
    ResidualWeights w;
    WeighResiduals(logits + h * kRowBlock, residual.levels + h * kRowBlock,
                   residual.code_weights + h * kRowBlock, residual.references[h], count, sums + h,
                   w);
    float* const value = values.value + h * dim;
    float* const value_sq = values.value_sq + h * dim;
    float* const projected = values.projected + h * kProjectionEntries;
    const auto keep = hn::Set(df, w.keep);
    const auto keep_sq = hn::Set(df, w.keep * w.keep);
    for (int i = 0; i < dim; i += n) {
      hn::StoreU(hn::Mul(hn::LoadU(df, value + i), keep), df, value + i);
      hn::StoreU(hn::Mul(hn::LoadU(df, value_sq + i), keep_sq), df, value_sq + i);
    }
    for (int i = 0; i < kProjectionEntries; i += n) {
      hn::StoreU(hn::Mul(hn::LoadU(df, projected + i), keep_sq), df, projected + i);
    }
    float norms = 0;
    for (int r = 0; r < count; ++r) {
      const T* v = reinterpret_cast<const T*>(rows[r]) + dim;
      const float* centre = residual.centres + static_cast<size_t>(r) * dim;
      const float* code = residual.codes + static_cast<size_t>(r) * kHeadDimMax;
      const auto x = hn::Set(df, w.x[r]);
      const auto estimate = hn::Set(df, -w.estimate[r]);
      const auto of_code = hn::Set(df, -w.code[r]);
      const auto weight = hn::Set(df, w.x[r] - w.estimate[r]);
      HWY_ALIGN float y[kProjectionDims] = {};
      auto norm = hn::Zero(df);
      for (int i = 0; i < dim; i += n) {
        // x v - x^ v^
        auto a = hn::Mul(hn::Mul(LoadWide(df, v + i), unit), x);
        a = hn::MulAdd(hn::LoadU(df, centre + i), estimate, a);
        a = hn::MulAdd(hn::LoadU(df, code + i), of_code, a);
        hn::StoreU(hn::Add(hn::LoadU(df, value + i), a), df, value + i);
        hn::StoreU(hn::MulAdd(a, weight, hn::LoadU(df, value_sq + i)), df, value_sq + i);
        norm = hn::MulAdd(a, a, norm);
        float* const at = y + i % kProjectionDims;
        hn::Store(hn::MulAdd(a, hn::LoadU(df, values.signs + i), hn::Load(df, at)), df, at);
      }
      norms += hn::GetLane(hn::SumOfLanes(df, norm));
      for (int a = 0; a < kProjectionDims; ++a) {
        const auto ya = hn::Set(df, y[a]);
        for (int lane = 0; lane < kProjectionDims; lane += n) {
          float* const to = projected + a * kProjectionDims + lane;
          hn::StoreU(hn::MulAdd(ya, hn::Load(df, y + lane), hn::LoadU(df, to)), df, to);
        }
      }
    }
    sums[h].sum_sq_norm += norms;
  }
}

void FoldResidualsImpl(DType dtype, const std::byte* const* rows, int count, int head_count,
                       int head_dim, const float* logits, const ResidualRows& residual,
                       RowSums* sums, const ValueSums& values) {
  const auto fold = dtype == DType::kF32   ? FoldResidualsOf<float>
                    : dtype == DType::kF16 ? FoldResidualsOf<hwy::float16_t>
                                           : FoldResidualsOf<hwy::bfloat16_t>;
  fold(rows, count, head_count, head_dim, logits, residual, sums, values);
}

}  // namespace HWY_NAMESPACE
}  // namespace spillway
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace spillway {
HWY_EXPORT(WeighPageImpl);
HWY_EXPORT(CodeWeightsImpl);
HWY_EXPORT(SumValueCodesImpl);
HWY_EXPORT(AddCentreImpl);
HWY_EXPORT(AddProductsImpl);
HWY_EXPORT(UndoHadamardImpl);
HWY_EXPORT(DecodeValueImpl);
HWY_EXPORT(FoldResidualsImpl);

HadamardSigns HadamardSigns::Of(int dim) {
  HadamardSigns signs{};
  for (int part = 0; part < HadamardCount(dim); ++part) {
    for (int i = 0; i < HadamardSize(dim); ++i) {
      signs.of[part][i] = HadamardNegates(part, i) ? -1.0f : 1.0f;
    }
  }
  return signs;
}

PageWeights WeighPage(const uint8_t* levels, const std::byte* value_factors) {
  return HWY_DYNAMIC_DISPATCH(WeighPageImpl)(levels, value_factors);
}
int CodeWeights(const uint8_t* levels, const std::byte* value_factors, float largest,
                int8_t* weights) {
  return HWY_DYNAMIC_DISPATCH(CodeWeightsImpl)(levels, value_factors, largest, weights);
}
void SumValueCodes(const CodeLayout& layout, const std::byte* page, const int8_t* weights,
                   int head_count, int32_t* sums) {
  HWY_DYNAMIC_DISPATCH(SumValueCodesImpl)(layout, page, weights, head_count, sums);
}
float AddCentre(const std::byte* centre, int dim, float inverse_unit, const float* weights,
                int head_count, float* sums) {
  return HWY_DYNAMIC_DISPATCH(AddCentreImpl)(centre, dim, inverse_unit, weights, head_count, sums);
}
void AddProducts(const int32_t* products, int dim, int32_t offset, float unit, float* sums) {
  HWY_DYNAMIC_DISPATCH(AddProductsImpl)(products, dim, offset, unit, sums);
}
void UndoHadamard(const HadamardSigns& signs, int dim, float* x) {
  HWY_DYNAMIC_DISPATCH(UndoHadamardImpl)(signs, dim, x);
}
void DecodeValue(const CodeLayout& layout, const HadamardSigns& signs, const std::byte* page,
                 int slot, float* code) {
  HWY_DYNAMIC_DISPATCH(DecodeValueImpl)(layout, signs, page, slot, code);
}
void FoldResiduals(DType dtype, const std::byte* const* rows, int count, int head_count,
                   int head_dim, const float* logits, const ResidualRows& residual, RowSums* sums,
                   const ValueSums& values) {
  HWY_DYNAMIC_DISPATCH(FoldResidualsImpl)
  (dtype, rows, count, head_count, head_dim, logits, residual, sums, values);
}
}  // namespace spillway
#endif
