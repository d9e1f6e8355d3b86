// Attention over rows [K | V] where they lie: logits, online softmax, and the
// second moments of sampled rows. fp32 accumulation in one fixed order.
#include <algorithm>
#include <cmath>
#include <cstring>

#include "host/core/exp.h"
#include "host/cpu/kernels.h"

#define HWY_DISABLED_TARGETS (HWY_SSSE3 | HWY_SSE4)
#define HWY_WANT_AVX3_DL
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "host/cpu/kernels_rows.cc"
#include "hwy/foreach_target.h"
//
#include "host/cpu/simd_math-inl.h"
#include "hwy/highway.h"

HWY_BEFORE_NAMESPACE();
namespace spillway {
namespace HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

using DF = hn::CappedTag<float, 16>;
using VF = hn::Vec<DF>;

template <typename T>
HWY_INLINE VF LoadRow(const T* p) {
  const DF df;
  if constexpr (std::is_same_v<T, float>) {
    return hn::LoadU(df, p);
  } else {
    return hn::PromoteTo(df, hn::LoadU(hn::Rebind<T, DF>(), p));
  }
}

template <int kCount>
HWY_INLINE void SumPairs(VF* v) {
  const DF df;
  for (int i = 0; i < kCount / 2; ++i) {
    v[i] = hn::Add(hn::ConcatEven(df, v[2 * i + 1], v[2 * i]),
                   hn::ConcatOdd(df, v[2 * i + 1], v[2 * i]));
  }
}

// Lane i of the result vectors, taken in order, is the sum of v[i]'s lanes.
// v has 16 vectors; the results stand in v[0 .. 16 / lanes).
HWY_INLINE void SumLanes16(VF* v) {
  const size_t lanes = hn::Lanes(DF());
  SumPairs<16>(v);
  SumPairs<8>(v);
  if (lanes >= 8) SumPairs<4>(v);
  if (lanes >= 16) SumPairs<2>(v);
}

// Asks for the half of a row that starts at `half`: the keys of the next block
// are fetched while this one's logits are computed, the values while it is
// folded, which keeps the memory evenly busy.
template <typename T>
HWY_INLINE void PrefetchHalf(const T* half, int head_dim) {
  // To the second level: the first has too few miss buffers for the bandwidth.
  for (int i = 0; i < head_dim; i += 64 / static_cast<int>(sizeof(T))) {
    __builtin_prefetch(half + i, /*rw=*/0, /*locality=*/2);
  }
}

template <typename T, int kHeads>
HWY_INLINE void LogitsHeads(const std::byte* const* rows, int count, const float* q, int dim,
                            float* logits, const std::byte* const* next) {
  const DF df;
  const int n = static_cast<int>(hn::Lanes(df));
  for (int r = 0; r < count; r += 4) {
    const T* k[4];
    for (int i = 0; i < 4; ++i) {
      k[i] = reinterpret_cast<const T*>(rows[std::min(r + i, count - 1)]);
      if (next != nullptr && r + i < count) {
        PrefetchHalf(reinterpret_cast<const T*>(next[r + i]), dim);
      }
    }
    VF acc[16];
    for (int i = 0; i < 16; ++i) acc[i] = hn::Zero(df);
    for (int c = 0; c < dim; c += n) {
      const auto k0 = LoadRow(k[0] + c);
      const auto k1 = LoadRow(k[1] + c);
      const auto k2 = LoadRow(k[2] + c);
      const auto k3 = LoadRow(k[3] + c);
      for (int h = 0; h < kHeads; ++h) {
        const auto qh = hn::LoadU(df, q + h * dim + c);
        acc[4 * h] = hn::MulAdd(k0, qh, acc[4 * h]);
        acc[4 * h + 1] = hn::MulAdd(k1, qh, acc[4 * h + 1]);
        acc[4 * h + 2] = hn::MulAdd(k2, qh, acc[4 * h + 2]);
        acc[4 * h + 3] = hn::MulAdd(k3, qh, acc[4 * h + 3]);
      }
    }
    SumLanes16(acc);
    HWY_ALIGN float sums[16];
    for (int i = 0; i < 16; i += n) hn::Store(acc[i / n], df, sums + i);
    for (int h = 0; h < kHeads; ++h) {
      std::memcpy(logits + h * kRowBlock + r, sums + 4 * h, 4 * sizeof(float));
    }
  }
}

#if HWY_TARGET == HWY_AVX3_DL
// sum += a . b over the two bf16 of every lane. By name, as Highway 1.0.3 does
// not tell the compiler of AVX512-BF16; the caller has asked the processor.
HWY_INLINE VF DotPairs(VF sum, __m512i a, __m512i b) {
  asm("vdpbf16ps %2, %1, %0" : "+v"(sum.raw) : "v"(a), "v"(b));
  return sum;
}

// LogitsHeads for bf16 rows and bf16 queries; dim is a multiple of 32.
template <int kHeads>
HWY_INLINE void LogitsHeadsBf16(const std::byte* const* rows, int count, const uint16_t* q, int dim,
                                float scale, float* logits, const std::byte* const* next) {
  const DF df;
  for (int r = 0; r < count; r += 4) {
    const std::byte* k[4];
    for (int i = 0; i < 4; ++i) {
      k[i] = rows[std::min(r + i, count - 1)];
      if (next != nullptr && r + i < count) {
        PrefetchHalf(reinterpret_cast<const hwy::bfloat16_t*>(next[r + i]), dim);
      }
    }
    VF acc[16];
    for (int i = 0; i < 16; ++i) acc[i] = hn::Zero(df);
    for (int c = 0; c < dim; c += 32) {
      const auto k0 = _mm512_loadu_si512(k[0] + 2 * c);
      const auto k1 = _mm512_loadu_si512(k[1] + 2 * c);
      const auto k2 = _mm512_loadu_si512(k[2] + 2 * c);
      const auto k3 = _mm512_loadu_si512(k[3] + 2 * c);
      for (int h = 0; h < kHeads; ++h) {
        const auto qh = _mm512_loadu_si512(q + h * dim + c);
        acc[4 * h] = DotPairs(acc[4 * h], k0, qh);
        acc[4 * h + 1] = DotPairs(acc[4 * h + 1], k1, qh);
        acc[4 * h + 2] = DotPairs(acc[4 * h + 2], k2, qh);
        acc[4 * h + 3] = DotPairs(acc[4 * h + 3], k3, qh);
      }
    }
    SumLanes16(acc);
    HWY_ALIGN float sums[16];
    hn::Store(hn::Mul(acc[0], hn::Set(df, scale)), df, sums);
    for (int h = 0; h < kHeads; ++h) {
      std::memcpy(logits + h * kRowBlock + r, sums + 4 * h, 4 * sizeof(float));
    }
  }
}

bool HasBf16() {
  static const bool has = __builtin_cpu_supports("avx512bf16");
  return has;
}
#endif

// Logits of kHeads heads from the first on, by the kernel that fits.
template <typename T, int kHeads>
HWY_INLINE void LogitsBlock(const std::byte* const* rows, const std::byte* const* next, int count,
                            const RowQueries& q, int first, float* logits) {
  const int64_t at = static_cast<int64_t>(first) * q.head_dim;
#if HWY_TARGET == HWY_AVX3_DL
  if constexpr (std::is_same_v<T, hwy::bfloat16_t>) {
    if (q.bf16 != nullptr && q.head_dim % 32 == 0 && HasBf16()) {
      LogitsHeadsBf16<kHeads>(rows, count, q.bf16 + at, q.head_dim, q.scale, logits, next);
      return;
    }
  }
#endif
  LogitsHeads<T, kHeads>(rows, count, q.scaled + at, q.head_dim, logits, next);
}

// Whether the first `count` logits of every head are finite.
HWY_INLINE bool AllFinite(const float* logits, int head_count, int count) {
  const DF df;
  const int n = static_cast<int>(hn::Lanes(df));
  auto lost = hn::Zero(df);
  for (int h = 0; h < head_count; ++h) {
    for (int i = 0; i < count; i += n) {
      // x - x is 0 for every finite x and NaN otherwise.
      const auto x = hn::LoadU(df, logits + h * kRowBlock + i);
      const auto zero = hn::Sub(x, x);
      lost = hn::Or(lost, i + n <= count ? zero : hn::IfThenElseZero(hn::FirstN(df, count - i), zero));
    }
  }
  return hn::AllTrue(df, hn::Eq(lost, hn::Zero(df)));
}

template <typename T>
bool RowLogitsTyped(const std::byte* const* rows, const std::byte* const* next, int count,
                    const RowQueries& q, float* logits) {
  for (int h = 0; h < q.head_count; h += 4) {
    float* out = logits + h * kRowBlock;
    const std::byte* const* ahead = h == 0 ? next : nullptr;
    switch (q.head_count - h) {
      case 1:
        LogitsBlock<T, 1>(rows, ahead, count, q, h, out);
        break;
      case 2:
        LogitsBlock<T, 2>(rows, ahead, count, q, h, out);
        break;
      case 3:
        LogitsBlock<T, 3>(rows, ahead, count, q, h, out);
        break;
      default:
        LogitsBlock<T, 4>(rows, ahead, count, q, h, out);
    }
  }
  return AllFinite(logits, q.head_count, count);
}

bool RowLogitsImpl(DType dtype, const std::byte* const* rows, const std::byte* const* next,
                   int count, const RowQueries& q, float* logits) {
  switch (dtype) {
    case DType::kF32:
      return RowLogitsTyped<float>(rows, next, count, q, logits);
    case DType::kF16:
      return RowLogitsTyped<hwy::float16_t>(rows, next, count, q, logits);
    default:
      return RowLogitsTyped<hwy::bfloat16_t>(rows, next, count, q, logits);
  }
}

// Turns the first `count` logits of a head into x = exp(logit - max), the rest
// of the block into 0, and updates the sums. Returns the factor by which what
// was summed before shrinks.
HWY_INLINE float Exponentials(float* logits, int count, bool moments, RowSums* sums) {
  const DF df;
  const int n = static_cast<int>(hn::Lanes(df));
  for (int i = count; i < kRowBlock; ++i) logits[i] = -HUGE_VALF;
  auto top = hn::LoadU(df, logits);
  for (int i = n; i < kRowBlock; i += n) top = hn::Max(top, hn::LoadU(df, logits + i));
  float max = hn::GetLane(hn::MaxOfLanes(df, top));
  float factor = 1;
  if (sums->count == 0) {
    factor = 0;
  } else if (max > sums->max) {
    factor = ExpF32(sums->max - max);
  } else {
    max = sums->max;
  }
  auto sum = hn::Zero(df);
  auto sum_sq = hn::Zero(df);
  for (int i = 0; i < kRowBlock; i += n) {
    const auto x = ExpVec(df, hn::Sub(hn::LoadU(df, logits + i), hn::Set(df, max)));
    hn::StoreU(x, df, logits + i);
    sum = hn::Add(sum, x);
    sum_sq = hn::MulAdd(x, x, sum_sq);
  }
  sums->max = max;
  sums->sum = sums->sum * factor + hn::GetLane(hn::SumOfLanes(df, sum));
  if (moments) {
    sums->sum_sq = sums->sum_sq * factor * factor + hn::GetLane(hn::SumOfLanes(df, sum_sq));
    sums->sum_sq_norm *= factor * factor;
  }
  sums->count += count;
  return factor;
}

template <typename T, int kHeads, int kColumns>
HWY_INLINE void FoldColumns(const std::byte* const* rows, const std::byte* const* next, int count,
                            int dim, int column, const float* x, const float* factors,
                            float* value) {
  const DF df;
  const int n = static_cast<int>(hn::Lanes(df));
  VF acc[kHeads][kColumns];
  for (int h = 0; h < kHeads; ++h) {
    const auto f = hn::Set(df, factors[h]);
    for (int c = 0; c < kColumns; ++c) {
      acc[h][c] = hn::Mul(hn::LoadU(df, value + h * dim + column + c * n), f);
    }
  }
  for (int r = 0; r < count; ++r) {
    const T* v = reinterpret_cast<const T*>(rows[r]) + dim + column;
    if (next != nullptr) {
      PrefetchHalf(reinterpret_cast<const T*>(next[r]) + dim + column, kColumns * n);
    }
    VF vc[kColumns];
    for (int c = 0; c < kColumns; ++c) vc[c] = LoadRow(v + c * n);
    for (int h = 0; h < kHeads; ++h) {
      const auto xh = hn::Set(df, x[h * kRowBlock + r]);
      for (int c = 0; c < kColumns; ++c) acc[h][c] = hn::MulAdd(vc[c], xh, acc[h][c]);
    }
  }
  for (int h = 0; h < kHeads; ++h) {
    for (int c = 0; c < kColumns; ++c) {
      hn::StoreU(acc[h][c], df, value + h * dim + column + c * n);
    }
  }
}

template <typename T, int kHeads>
HWY_INLINE void FoldHeads(const std::byte* const* rows, const std::byte* const* next, int count,
                          int dim, const float* x, const float* factors, float* value) {
  const DF df;
  const int n = static_cast<int>(hn::Lanes(df));
  int c = 0;
  for (; c + 4 * n <= dim; c += 4 * n) {
    FoldColumns<T, kHeads, 4>(rows, next, count, dim, c, x, factors, value);
  }
  for (; c < dim; c += n) FoldColumns<T, kHeads, 1>(rows, next, count, dim, c, x, factors, value);
}

template <typename T>
void FoldTyped(const std::byte* const* rows, const std::byte* const* next, int count,
               const int* counts, int head_count, int dim, float* logits, RowSums* sums,
               float* value) {
  for (int h0 = 0; h0 < head_count; h0 += 4) {
    const int heads = std::min(4, head_count - h0);
    float factors[4];
    int most = 0;
    for (int h = 0; h < heads; ++h) {
      const int rows_of = counts == nullptr ? count : counts[h0 + h];
      most = std::max(most, rows_of);
      factors[h] = 1;
      if (rows_of > 0) {
        factors[h] = Exponentials(logits + (h0 + h) * kRowBlock, rows_of, false, sums + h0 + h);
      } else {
        std::fill_n(logits + (h0 + h) * kRowBlock, kRowBlock, 0.0f);
      }
    }
    const float* x = logits + h0 * kRowBlock;
    float* out = value + h0 * dim;
    switch (heads) {
      case 1:
        FoldHeads<T, 1>(rows, h0 == 0 ? next : nullptr, most, dim, x, factors, out);
        break;
      case 2:
        FoldHeads<T, 2>(rows, h0 == 0 ? next : nullptr, most, dim, x, factors, out);
        break;
      case 3:
        FoldHeads<T, 3>(rows, h0 == 0 ? next : nullptr, most, dim, x, factors, out);
        break;
      default:
        FoldHeads<T, 4>(rows, h0 == 0 ? next : nullptr, most, dim, x, factors, out);
    }
  }
}

void FoldRowsImpl(DType dtype, const std::byte* const* rows, const std::byte* const* next,
                  int count, const int* counts, int head_count, int head_dim, float* logits,
                  RowSums* sums, float* value) {
  switch (dtype) {
    case DType::kF32:
      return FoldTyped<float>(rows, next, count, counts, head_count, head_dim, logits, sums, value);
    case DType::kF16:
      return FoldTyped<hwy::float16_t>(rows, next, count, counts, head_count, head_dim, logits,
                                       sums, value);
    default:
      return FoldTyped<hwy::bfloat16_t>(rows, next, count, counts, head_count, head_dim, logits,
                                        sums, value);
  }
}

template <typename T>
void FoldMomentsTyped(const std::byte* const* rows, const std::byte* const* next, int count,
                      int head_count, int dim, float* logits, RowSums* sums, float* value,
                      float* value_sq) {
  const DF df;
  const int n = static_cast<int>(hn::Lanes(df));
  for (int h = 0; h < head_count; ++h) {
    float* x = logits + h * kRowBlock;
    const float factor = Exponentials(x, count, true, sums + h);
    const auto f1 = hn::Set(df, factor);
    const auto f2 = hn::Set(df, factor * factor);
    auto norm = hn::Zero(df);
    const auto fold = [&](auto columns, int c) HWY_ATTR {
      constexpr int kColumns = decltype(columns)::value;
      VF first[kColumns], second[kColumns];
      for (int i = 0; i < kColumns; ++i) {
        first[i] = hn::Mul(hn::LoadU(df, value + h * dim + c + i * n), f1);
        second[i] = hn::Mul(hn::LoadU(df, value_sq + h * dim + c + i * n), f2);
      }
      for (int r = 0; r < count; ++r) {
        const T* v = reinterpret_cast<const T*>(rows[r]) + dim + c;
        if (h == 0 && next != nullptr) {
          PrefetchHalf(reinterpret_cast<const T*>(next[r]) + dim + c, kColumns * n);
        }
        const auto xr = hn::Set(df, x[r]);
        for (int i = 0; i < kColumns; ++i) {
          const auto xv = hn::Mul(LoadRow(v + i * n), xr);
          first[i] = hn::Add(first[i], xv);
          second[i] = hn::MulAdd(xr, xv, second[i]);
          norm = hn::MulAdd(xv, xv, norm);
        }
      }
      for (int i = 0; i < kColumns; ++i) {
        hn::StoreU(first[i], df, value + h * dim + c + i * n);
        hn::StoreU(second[i], df, value_sq + h * dim + c + i * n);
      }
    };
    int c = 0;
    for (; c + 4 * n <= dim; c += 4 * n) fold(std::integral_constant<int, 4>(), c);
    for (; c < dim; c += n) fold(std::integral_constant<int, 1>(), c);
    sums[h].sum_sq_norm += hn::GetLane(hn::SumOfLanes(df, norm));
  }
}

void FoldRowsMomentsImpl(DType dtype, const std::byte* const* rows, const std::byte* const* next,
                         int count, int head_count, int head_dim, float* logits, RowSums* sums,
                         float* value, float* value_sq) {
  switch (dtype) {
    case DType::kF32:
      return FoldMomentsTyped<float>(rows, next, count, head_count, head_dim, logits, sums, value,
                                     value_sq);
    case DType::kF16:
      return FoldMomentsTyped<hwy::float16_t>(rows, next, count, head_count, head_dim, logits, sums,
                                              value, value_sq);
    default:
      return FoldMomentsTyped<hwy::bfloat16_t>(rows, next, count, head_count, head_dim, logits,
                                               sums, value, value_sq);
  }
}

uint64_t ReadAllImpl(const std::byte* data, int64_t bytes) {
  const hn::CappedTag<uint64_t, 8> d;
  const int64_t n = static_cast<int64_t>(hn::Lanes(d));
  const auto* p = reinterpret_cast<const uint64_t*>(data);
  const int64_t count = bytes / 8;
  auto a = hn::Zero(d), b = hn::Zero(d), c = hn::Zero(d), e = hn::Zero(d);
  int64_t i = 0;
  for (; i + 4 * n <= count; i += 4 * n) {
    a = hn::Xor(a, hn::LoadU(d, p + i));
    b = hn::Xor(b, hn::LoadU(d, p + i + n));
    c = hn::Xor(c, hn::LoadU(d, p + i + 2 * n));
    e = hn::Xor(e, hn::LoadU(d, p + i + 3 * n));
  }
  uint64_t sum = hn::GetLane(hn::SumOfLanes(d, hn::Xor(hn::Xor(a, b), hn::Xor(c, e))));
  for (; i < count; ++i) sum ^= p[i];
  return sum;
}

}  // namespace HWY_NAMESPACE
}  // namespace spillway
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace spillway {
HWY_EXPORT(RowLogitsImpl);
HWY_EXPORT(FoldRowsImpl);
HWY_EXPORT(FoldRowsMomentsImpl);
HWY_EXPORT(ReadAllImpl);

bool RowLogits(DType dtype, const std::byte* const* rows, const std::byte* const* next, int count,
               const RowQueries& queries, float* logits) {
  return HWY_DYNAMIC_DISPATCH(RowLogitsImpl)(dtype, rows, next, count, queries, logits);
}
void FoldRows(DType dtype, const std::byte* const* rows, const std::byte* const* next, int count,
              const int* counts, int head_count, int head_dim, float* logits, RowSums* sums,
              float* value) {
  HWY_DYNAMIC_DISPATCH(FoldRowsImpl)
  (dtype, rows, next, count, counts, head_count, head_dim, logits, sums, value);
}
void FoldRowsMoments(DType dtype, const std::byte* const* rows, const std::byte* const* next,
                     int count, int head_count, int head_dim, float* logits, RowSums* sums,
                     float* value, float* value_sq) {
  HWY_DYNAMIC_DISPATCH(FoldRowsMomentsImpl)
  (dtype, rows, next, count, head_count, head_dim, logits, sums, value, value_sq);
}
uint64_t ReadAll(const std::byte* data, int64_t bytes) {
  return HWY_DYNAMIC_DISPATCH(ReadAllImpl)(data, bytes);
}
}  // namespace spillway
#endif
