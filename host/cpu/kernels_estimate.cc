// Estimates from what index pages hold beside codes, lanes being tokens.
#include <algorithm>
#include <cstring>

#include "host/base/elements.h"
#include "host/core/sketch.h"
#include "host/cpu/kernels.h"
#include "host/memory/layer_rows.h"

// One compilation of this file per instruction set; see Highway's
// "Dynamic dispatch".
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "host/cpu/kernels_estimate.cc"
#include "hwy/foreach_target.h"  // IWYU pragma: keep
//
#include "hwy/highway.h"

HWY_BEFORE_NAMESPACE();
namespace spillway {
namespace HWY_NAMESPACE {
namespace {

namespace hn = hwy::HWY_NAMESPACE;
using DF = hn::CappedTag<float, 16>;
using DU = hn::RebindToUnsigned<DF>;
using VF = hn::Vec<DF>;

// HalfToFloat of the low 16 bits.
template <class V>
VF HalfVec(V half) {
  const DF df;
  const DU du;
  const auto magnitude =
      hn::Mul(hn::BitCast(df, hn::ShiftLeft<13>(hn::And(half, hn::Set(du, 0x7FFFu)))),
              hn::Set(df, 0x1p112f));
  return hn::BitCast(df, hn::Or(hn::BitCast(du, magnitude),
                                hn::ShiftLeft<16>(hn::And(half, hn::Set(du, 0x8000u)))));
}

// CutEstimate.
VF Cut(VF l) {
  const DF df;
  const auto most = hn::Set(df, kEstimateMax);
  const auto least = hn::Set(df, -kEstimateMax);
  const auto low = hn::IfThenElse(hn::Lt(l, most), l, most);
  return hn::IfThenElse(hn::Gt(low, least), low, least);
}

// Estimates of heads [head, head + kHeads).
template <int kHeads>
void SketchHeads(const SketchQuery& query, int head, const uint32_t* words, float* logits) {
  const DF df;
  const DU du;
  const hn::RebindToSigned<DF> di;
  const int n = static_cast<int>(hn::Lanes(df));
  const int channels = query.channel_count;
  const float* const q = query.q + int64_t{head} * channels;
  for (int t = 0; t < kPageTokenCount; t += n) {
    VF sums[kHeads];
    for (VF& s : sums) s = hn::Zero(df);
    for (int w = 0; w < channels / 8; ++w) {
      auto word = hn::LoadU(du, words + w * kPageTokenCount + t);
      for (int i = 0; i < 8; ++i, word = hn::ShiftRight<4>(word)) {
        const auto u = hn::ConvertTo(df, hn::BitCast(di, hn::And(word, hn::Set(du, 15u))));
        for (int h = 0; h < kHeads; ++h) {
          sums[h] = hn::MulAdd(hn::Set(df, q[h * channels + 8 * w + i]), u, sums[h]);
        }
      }
    }
    const auto packed = hn::LoadU(du, words + channels / 8 * kPageTokenCount + t);
    const VF step = HalfVec(packed);
    const VF low = HalfVec(hn::ShiftRight<16>(packed));
    for (int h = 0; h < kHeads; ++h) {
      const VF l = hn::MulAdd(step, sums[h], hn::Mul(low, hn::Set(df, query.sum[head + h])));
      hn::StoreU(Cut(l), df, logits + (head + h) * kPageTokenCount + t);
    }
  }
}

void SketchLogitsImpl(const SketchQuery& query, const std::byte* section, float* logits) {
  const auto* words = reinterpret_cast<const uint32_t*>(section);
  int h = 0;
  for (; h + 4 <= query.head_count; h += 4) SketchHeads<4>(query, h, words, logits);
  switch (query.head_count - h) {
    case 3:
      return SketchHeads<3>(query, h, words, logits);
    case 2:
      return SketchHeads<2>(query, h, words, logits);
    case 1:
      return SketchHeads<1>(query, h, words, logits);
    default:
      return;
  }
}

void CountSharedImpl(const uint16_t* query, int table_count, const std::byte* buckets,
                     uint16_t* counts) {
  const hn::CappedTag<uint16_t, 32> d;
  const int n = static_cast<int>(hn::Lanes(d));
  const auto* names = reinterpret_cast<const uint16_t*>(buckets);
  const auto one = hn::Set(d, uint16_t{1});
  for (int t = 0; t < kPageTokenCount; t += n) {
    auto count = hn::Zero(d);
    for (int table = 0; table < table_count; ++table) {
      const auto name = hn::LoadU(d, names + int64_t{table} * kPageTokenCount + t);
      const auto same = hn::Eq(name, hn::Set(d, query[table]));
      count = hn::Add(count, hn::IfThenElseZero(same, one));
    }
    hn::StoreU(count, d, counts + t);
  }
}

}  // namespace
}  // namespace HWY_NAMESPACE
}  // namespace spillway
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace spillway {
HWY_EXPORT(SketchLogitsImpl);
HWY_EXPORT(CountSharedImpl);

void SketchLogits(const SketchQuery& query, const std::byte* section, float* logits) {
  HWY_DYNAMIC_DISPATCH(SketchLogitsImpl)(query, section, logits);
}

void CountShared(const uint16_t* query, int table_count, const std::byte* buckets,
                 uint16_t* counts) {
  HWY_DYNAMIC_DISPATCH(CountSharedImpl)(query, table_count, buckets, counts);
}

void BoundLogits(DType dtype, const RowQueries& queries, int page_count, const std::byte* section,
                 float* logits) {
  constexpr int kPagesMax = 8;
  const int d = queries.head_dim;
  float bounds[2 * kHeadDimMax * kPagesMax];
  ToFloat(dtype, section, int64_t{2} * d * page_count, bounds);
  const int64_t page_tokens = kPageTokenCount / page_count;
  for (int h = 0; h < queries.head_count; ++h) {
    float sums[kPagesMax] = {};
    for (int i = 0; i < d; ++i) {
      const float q = queries.scaled[h * d + i];
      for (int p = 0; p < page_count; ++p) {
        const float a = q * bounds[i * page_count + p];
        const float b = q * bounds[(d + i) * page_count + p];
        sums[p] += a > b ? a : b;
      }
    }
    for (int p = 0; p < page_count; ++p) {
      std::fill_n(logits + h * kPageTokenCount + p * page_tokens, page_tokens,
                  CutEstimate(sums[p]));
    }
  }
}

}  // namespace spillway
#endif
