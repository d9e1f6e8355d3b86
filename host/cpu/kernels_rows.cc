// Attention over rows [K | V] in place: logits, online softmax, and the second moments of sampled
// rows. Sums in fp32, in one fixed order.
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

template <int kCount>
HWY_INLINE void SumPairs(VF* v) {
  const DF df;
  for (int i = 0; i < kCount / 2; ++i) {
    v[i] = hn::Add(hn::ConcatEven(df, v[2 * i + 1], v[2 * i]),
                   hn::ConcatOdd(df, v[2 * i + 1], v[2 * i]));
  }
}

// Sums the lanes of each of the 16 vectors v. The 16 sums, in order, fill v[0 .. 16 / lanes).
HWY_INLINE void SumLanes16(VF* v) {
  const size_t lanes = hn::Lanes(DF());
  SumPairs<16>(v);
  SumPairs<8>(v);
  if (lanes >= 8) SumPairs<4>(v);
  if (lanes >= 16) SumPairs<2>(v);
}

// Fetches a run of rows to the first-level cache, some lines at a time. The logits of a block fetch
// the first half of the next block's rows, and its fold the second, so that the memory is evenly
// busy. Whole rows, and not keys for logits and values for folds: the hardware's own prefetch
// follows lines in order, and does most of the work.
class RowPrefetch {
 public:
  // rows: may be null, which fetches nothing.
  RowPrefetch(const std::byte* const* rows, int begin, int end, int64_t row_bytes)
      : rows_(rows), row_(begin), end_(rows == nullptr ? begin : end), row_bytes_(row_bytes) {}

  template <int kLines>
  HWY_INLINE void Fetch() {
    if (row_ >= end_) return;
    const std::byte* const line = rows_[row_] + at_;
    for (int i = 0; i < kLines; ++i) __builtin_prefetch(line + i * kLineBytes, /*rw=*/0);
    at_ += kLines * kLineBytes;
    if (at_ < row_bytes_) return;
    at_ = 0;
    ++row_;
  }
  HWY_INLINE void FetchRow() {
    if (row_ >= end_) return;
    for (; at_ < row_bytes_; at_ += kLineBytes) __builtin_prefetch(rows_[row_] + at_, /*rw=*/0);
    at_ = 0;
    ++row_;
  }

  static constexpr int64_t kLineBytes = 64;

 private:
  const std::byte* const* rows_;
  int row_;
  int end_;
  int64_t row_bytes_;
  int64_t at_ = 0;  // in the row
};

template <typename T>
constexpr int64_t RowBytes(int head_dim) {
  return 2 * int64_t{head_dim} * int64_t{sizeof(T)};
}

// Rows of a block of `count` that logits fetch; the fold fetches the others.
constexpr int FetchedByLogits(int count) { return (count + 1) / 2; }

template <typename T, int kHeads>
HWY_INLINE void LogitsHeads(const std::byte* const* rows, int count, const float* q, int dim,
                            float* logits, RowPrefetch ahead) {
  const DF df;
  const int n = static_cast<int>(hn::Lanes(df));
  for (int r = 0; r < count; r += 4) {
    const T* k[4];
    for (int i = 0; i < 4; ++i) {
      k[i] = reinterpret_cast<const T*>(rows[std::min(r + i, count - 1)]);
    }
    ahead.FetchRow();
    ahead.FetchRow();
    VF acc[16];
    for (int i = 0; i < 16; ++i) acc[i] = hn::Zero(df);
    for (int c = 0; c < dim; c += n) {
      const auto k0 = LoadWide(DF(), k[0] + c);
      const auto k1 = LoadWide(DF(), k[1] + c);
      const auto k2 = LoadWide(DF(), k[2] + c);
      const auto k3 = LoadWide(DF(), k[3] + c);
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
// sum += a . b over the two bf16 of every lane. As assembly, because Highway 1.0.3 does not tell
// the compiler about AVX512-BF16. The caller has checked that the processor has it.
HWY_INLINE VF DotPairs(VF sum, __m512i a, __m512i b) {
  asm("vdpbf16ps %2, %1, %0" : "+v"(sum.raw) : "v"(a), "v"(b));
  return sum;
}

// LogitsHeads for bf16 rows and bf16 queries; dim is a multiple of 32.
template <int kHeads>
HWY_INLINE void LogitsHeadsBf16(const std::byte* const* rows, int count, const uint16_t* q, int dim,
                                float scale, float* logits, RowPrefetch ahead) {
  const DF df;
  for (int r = 0; r < count; r += 4) {
    const std::byte* k[4];
    for (int i = 0; i < 4; ++i) k[i] = rows[std::min(r + i, count - 1)];
    ahead.FetchRow();
    ahead.FetchRow();
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

// Logits of kHeads heads from `first` on, by the fastest kernel that applies.
template <typename T, int kHeads>
HWY_INLINE void LogitsBlock(const std::byte* const* rows, const std::byte* const* next, int count,
                            const RowQueries& q, int first, float* logits) {
  const int64_t at = static_cast<int64_t>(first) * q.head_dim;
  const RowPrefetch ahead(next, 0, FetchedByLogits(count), RowBytes<T>(q.head_dim));
#if HWY_TARGET == HWY_AVX3_DL
  if constexpr (std::is_same_v<T, hwy::bfloat16_t>) {
    if (q.bf16 != nullptr && q.head_dim % 32 == 0 && HasBf16()) {
      LogitsHeadsBf16<kHeads>(rows, count, q.bf16 + at, q.head_dim, q.scale, logits, ahead);
      return;
    }
  }
#endif
  LogitsHeads<T, kHeads>(rows, count, q.scaled + at, q.head_dim, logits, ahead);
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
      lost =
          hn::Or(lost, i + n <= count ? zero : hn::IfThenElseZero(hn::FirstN(df, count - i), zero));
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

// Turns the first `count` logits of a head into x = exp(logit - max), sets the rest of the block to
// 0, and updates the sums. Returns the factor by which the caller must multiply the head's earlier
// sums of values.
HWY_INLINE float Exponentials(float* logits, int count, bool moments, RowSums* sums) {
  const DF df;
  const int n = static_cast<int>(hn::Lanes(df));
  for (int i = count; i < kRowBlock; ++i) logits[i] = -HUGE_VALF;
  auto top = hn::LoadU(df, logits);
  for (int i = n; i < kRowBlock; i += n) top = hn::Max(top, hn::LoadU(df, logits + i));
  const float max = std::max(sums->max, hn::GetLane(hn::MaxOfLanes(df, top)));
  auto sum = hn::Zero(df);
  auto sum_sq = hn::Zero(df);
  for (int i = 0; i < kRowBlock; i += n) {
    const auto x = ExpVec(df, hn::Sub(hn::LoadU(df, logits + i), hn::Set(df, max)));
    hn::StoreU(x, df, logits + i);
    sum = hn::Add(sum, x);
    sum_sq = hn::MulAdd(x, x, sum_sq);
  }
  const SoftmaxSums block{max, hn::GetLane(hn::SumOfLanes(df, sum)),
                          moments ? hn::GetLane(hn::SumOfLanes(df, sum_sq)) : 0.0f, 0.0f};
  sums->count += count;
  return sums->Merge(block).keep;
}

// The weights x of a block's rows, [head][kRowBlock], and x^2 with moments, both times the inverse
// of the unit of values; and the factors by which the heads' earlier sums are multiplied first.
struct FoldWeights {
  float factor[4];
  HWY_ALIGN float x[4 * kRowBlock];
  HWY_ALIGN float x_sq[4 * kRowBlock];
};

template <typename T, int kHeads, int kColumns, bool kMoments>
HWY_INLINE void FoldColumns(const std::byte* const* rows, RowPrefetch& ahead, int count, int dim,
                            int column, const FoldWeights& w, float* value, float* value_sq) {
  const DF df;
  const int n = static_cast<int>(hn::Lanes(df));
  // All columns of all rows fetch as many lines as half of the rows have.
  constexpr int kLines =
      std::max<int>(1, kColumns * hn::MaxLanes(df) * sizeof(T) / RowPrefetch::kLineBytes);
  VF first[kHeads][kColumns];
  VF second[kHeads][kColumns];
  for (int h = 0; h < kHeads; ++h) {
    const auto f = hn::Set(df, w.factor[h]);
    for (int c = 0; c < kColumns; ++c) {
      const int at = h * dim + column + c * n;
      first[h][c] = hn::Mul(hn::LoadU(df, value + at), f);
      if constexpr (kMoments) {
        second[h][c] = hn::Mul(hn::LoadU(df, value_sq + at), hn::Mul(f, f));
      }
    }
  }
  for (int r = 0; r < count; ++r) {
    const T* v = reinterpret_cast<const T*>(rows[r]) + dim + column;
    ahead.template Fetch<kLines>();
    VF vc[kColumns];
    for (int c = 0; c < kColumns; ++c) vc[c] = LoadWide(DF(), v + c * n);
    for (int h = 0; h < kHeads; ++h) {
      const auto x = hn::Set(df, w.x[h * kRowBlock + r]);
      for (int c = 0; c < kColumns; ++c) first[h][c] = hn::MulAdd(vc[c], x, first[h][c]);
      if constexpr (kMoments) {
        const auto x_sq = hn::Set(df, w.x_sq[h * kRowBlock + r]);
        for (int c = 0; c < kColumns; ++c) second[h][c] = hn::MulAdd(vc[c], x_sq, second[h][c]);
      }
    }
  }
  for (int h = 0; h < kHeads; ++h) {
    for (int c = 0; c < kColumns; ++c) {
      const int at = h * dim + column + c * n;
      hn::StoreU(first[h][c], df, value + at);
      if constexpr (kMoments) hn::StoreU(second[h][c], df, value_sq + at);
    }
  }
}

template <typename T, int kHeads, bool kMoments>
HWY_INLINE void FoldHeads(const std::byte* const* rows, const std::byte* const* next, int count,
                          int dim, const FoldWeights& w, float* value, float* value_sq) {
  // As many columns at once as there are registers for their sums.
  constexpr int kColumns = kMoments ? 2 : 4;
  const int n = static_cast<int>(hn::Lanes(DF()));
  RowPrefetch ahead(next, FetchedByLogits(count), count, RowBytes<T>(dim));
  int c = 0;
  for (; c + kColumns * n <= dim; c += kColumns * n) {
    FoldColumns<T, kHeads, kColumns, kMoments>(rows, ahead, count, dim, c, w, value, value_sq);
  }
  for (; c < dim; c += n) {
    FoldColumns<T, kHeads, 1, kMoments>(rows, ahead, count, dim, c, w, value, value_sq);
  }
}

// ||v||^2 of the block's rows, v in units; 0 beyond `count`.
template <typename T>
HWY_INLINE void ValueNorms(const std::byte* const* rows, int count, int dim, float inverse_unit,
                           float* norms) {
  const DF df;
  const int n = static_cast<int>(hn::Lanes(df));
  const auto unit = hn::Set(df, inverse_unit);
  for (int r = 0; r < kRowBlock; r += 16) {
    VF sums[16];
    for (int i = 0; i < 16; ++i) {
      sums[i] = hn::Zero(df);
      if (r + i >= count) continue;
      const T* v = reinterpret_cast<const T*>(rows[r + i]) + dim;
      for (int c = 0; c < dim; c += n) {
        const auto x = hn::Mul(LoadWide(DF(), v + c), unit);
        sums[i] = hn::MulAdd(x, x, sums[i]);
      }
    }
    SumLanes16(sums);
    for (int i = 0; i < 16; i += n) hn::StoreU(sums[i / n], df, norms + r + i);
  }
}

// The projections y [row][kProjectionDims] of the block's values, in units.
template <typename T>
HWY_INLINE void ProjectValues(const std::byte* const* rows, int count, int dim,
                              const ValueSums& values, float* y) {
  const DF df;
  const int n = static_cast<int>(hn::Lanes(df));
  const auto unit = hn::Set(df, values.inverse_unit);
  for (int r = 0; r < count; ++r) {
    const T* v = reinterpret_cast<const T*>(rows[r]) + dim;
    for (int lane = 0; lane < kProjectionDims; lane += n) {
      auto sum = hn::Zero(df);
      for (int i = lane; i < dim; i += kProjectionDims) {
        sum =
            hn::MulAdd(hn::Mul(LoadWide(DF(), v + i), unit), hn::LoadU(df, values.signs + i), sum);
      }
      hn::Store(sum, df, y + r * kProjectionDims + lane);
    }
  }
}

// projected [16][16] = factor^2 projected + sum x^2 y y^T, for one head.
HWY_INLINE void FoldProjected(const float* y, int count, const float* x_sq, float factor,
                              float* projected) {
  const DF df;
  const int n = static_cast<int>(hn::Lanes(df));
  const auto keep = hn::Set(df, factor * factor);
  constexpr int kRows = 8;  // rows of the matrix whose sums stay in registers
  for (int lane = 0; lane < kProjectionDims; lane += n) {
    for (int first = 0; first < kProjectionDims; first += kRows) {
      VF sums[kRows];
      float* out = projected + first * kProjectionDims + lane;
      for (int a = 0; a < kRows; ++a) {
        sums[a] = hn::Mul(hn::LoadU(df, out + a * kProjectionDims), keep);
      }
      for (int r = 0; r < count; ++r) {
        const float* row = y + r * kProjectionDims;
        const auto weighed = hn::Mul(hn::Load(df, row + lane), hn::Set(df, x_sq[r]));
        for (int a = 0; a < kRows; ++a) {
          sums[a] = hn::MulAdd(hn::Set(df, row[first + a]), weighed, sums[a]);
        }
      }
      for (int a = 0; a < kRows; ++a) hn::StoreU(sums[a], df, out + a * kProjectionDims);
    }
  }
}

// x_sq = x^2 for a head's weights. Returns the sum of x^2 ||v||^2.
HWY_INLINE float SquareWeights(const float* x, const float* norms, float* x_sq) {
  const DF df;
  const int n = static_cast<int>(hn::Lanes(df));
  auto sum = hn::Zero(df);
  for (int i = 0; i < kRowBlock; i += n) {
    const auto xi = hn::LoadU(df, x + i);
    const auto square = hn::Mul(xi, xi);
    hn::Store(square, df, x_sq + i);
    // A norm beyond fp32's range (infinity) times a weight of 0 would be NaN.
    const auto term = hn::Mul(square, hn::Load(df, norms + i));
    sum = hn::Add(sum, hn::IfThenZeroElse(hn::Eq(square, hn::Zero(df)), term));
  }
  return hn::GetLane(hn::SumOfLanes(df, sum));
}

HWY_INLINE void ScaleBlock(const float* from, float by, float* to) {
  const DF df;
  const auto factor = hn::Set(df, by);
  for (int i = 0; i < kRowBlock; i += static_cast<int>(hn::Lanes(df))) {
    hn::Store(hn::Mul(hn::LoadU(df, from + i), factor), df, to + i);
  }
}

template <typename T, bool kMoments>
void FoldTyped(const std::byte* const* rows, const std::byte* const* next, int count,
               const int* counts, int head_count, int dim, float* logits, RowSums* sums,
               const ValueSums& values) {
  HWY_ALIGN float norms[kRowBlock];
  HWY_ALIGN float y[kRowBlock * kProjectionDims];
  if constexpr (kMoments) {
    ValueNorms<T>(rows, count, dim, values.inverse_unit, norms);
    ProjectValues<T>(rows, count, dim, values, y);
  }
  for (int h0 = 0; h0 < head_count; h0 += 4) {
    const int heads = std::min(4, head_count - h0);
    FoldWeights w;
    int most = 0;
    for (int h = 0; h < heads; ++h) {
      const int rows_of = counts == nullptr ? count : counts[h0 + h];
      float* x = logits + (h0 + h) * kRowBlock;
      most = std::max(most, rows_of);
      w.factor[h] = 1;
      if (rows_of > 0) {
        w.factor[h] = Exponentials(x, rows_of, kMoments, sums + h0 + h);
      } else {
        std::fill_n(x, kRowBlock, 0.0f);
      }
      if constexpr (kMoments) {
        sums[h0 + h].sum_sq_norm += SquareWeights(x, norms, w.x_sq + h * kRowBlock);
        FoldProjected(y, count, w.x_sq + h * kRowBlock, w.factor[h],
                      values.projected + (h0 + h) * kProjectionEntries);
        ScaleBlock(w.x_sq + h * kRowBlock, values.inverse_unit, w.x_sq + h * kRowBlock);
      }
      ScaleBlock(x, values.inverse_unit, w.x + h * kRowBlock);
    }
    const std::byte* const* ahead = h0 == 0 ? next : nullptr;
    float* out = values.value + h0 * dim;
    float* out_sq = kMoments ? values.value_sq + h0 * dim : nullptr;
    switch (heads) {
      case 1:
        FoldHeads<T, 1, kMoments>(rows, ahead, most, dim, w, out, out_sq);
        break;
      case 2:
        FoldHeads<T, 2, kMoments>(rows, ahead, most, dim, w, out, out_sq);
        break;
      case 3:
        FoldHeads<T, 3, kMoments>(rows, ahead, most, dim, w, out, out_sq);
        break;
      default:
        FoldHeads<T, 4, kMoments>(rows, ahead, most, dim, w, out, out_sq);
    }
  }
}

template <typename T>
void FoldOf(const std::byte* const* rows, const std::byte* const* next, int count,
            const int* counts, int head_count, int head_dim, float* logits, RowSums* sums,
            const ValueSums& values) {
  const auto fold = values.value_sq != nullptr ? FoldTyped<T, true> : FoldTyped<T, false>;
  fold(rows, next, count, counts, head_count, head_dim, logits, sums, values);
}

void FoldRowsImpl(DType dtype, const std::byte* const* rows, const std::byte* const* next,
                  int count, const int* counts, int head_count, int head_dim, float* logits,
                  RowSums* sums, const ValueSums& values) {
  const auto fold = dtype == DType::kF32   ? FoldOf<float>
                    : dtype == DType::kF16 ? FoldOf<hwy::float16_t>
                                           : FoldOf<hwy::bfloat16_t>;
  fold(rows, next, count, counts, head_count, head_dim, logits, sums, values);
}

}  // namespace HWY_NAMESPACE
}  // namespace spillway
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace spillway {
HWY_EXPORT(RowLogitsImpl);
HWY_EXPORT(FoldRowsImpl);

bool RowLogits(DType dtype, const std::byte* const* rows, const std::byte* const* next, int count,
               const RowQueries& queries, float* logits) {
  return HWY_DYNAMIC_DISPATCH(RowLogitsImpl)(dtype, rows, next, count, queries, logits);
}
void FoldRows(DType dtype, const std::byte* const* rows, const std::byte* const* next, int count,
              const int* counts, int head_count, int head_dim, float* logits, RowSums* sums,
              const ValueSums& values) {
  HWY_DYNAMIC_DISPATCH(FoldRowsImpl)
  (dtype, rows, next, count, counts, head_count, head_dim, logits, sums, values);
}
}  // namespace spillway
#endif
