// Stores elements with four bits, and estimates logits from them with one lane per token.
#include "host/methods/int4_keys/int4_elements.h"

#include <algorithm>
#include <limits>
#include <vector>

#include "host/base/elements.h"
#include "host/methods/int4_keys/int4_range.h"

// One compilation of this file per instruction set; see Highway's
// "Dynamic dispatch".
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "host/methods/int4_keys/int4_elements.cc"
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

// HalfToFloat() of the low 16 bits of each lane.
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

// CutEstimate() of each lane.
VF Cut(VF l) {
  const DF df;
  const auto most = hn::Set(df, kEstimateMax);
  const auto least = hn::Set(df, -kEstimateMax);
  const auto low = hn::IfThenElse(hn::Lt(l, most), l, most);
  return hn::IfThenElse(hn::Gt(low, least), low, least);
}

// Estimates the logits of heads [head, head + kHeads).
template <int kHeads>
void Int4Heads(const Int4Query& query, int head, const uint32_t* words, float* logits) {
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

void Int4LogitsImpl(const Int4Query& query, const std::byte* section, float* logits) {
  const auto* words = reinterpret_cast<const uint32_t*>(section);
  int h = 0;
  for (; h + 4 <= query.head_count; h += 4) Int4Heads<4>(query, h, words, logits);
  switch (query.head_count - h) {
    case 3:
      return Int4Heads<3>(query, h, words, logits);
    case 2:
      return Int4Heads<2>(query, h, words, logits);
    case 1:
      return Int4Heads<1>(query, h, words, logits);
    default:
      return;
  }
}

}  // namespace
}  // namespace HWY_NAMESPACE
}  // namespace spillway
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace spillway {
HWY_EXPORT(Int4LogitsImpl);

void Int4Logits(const Int4Query& query, const std::byte* section, float* logits) {
  HWY_DYNAMIC_DISPATCH(Int4LogitsImpl)(query, section, logits);
}

void StoreInt4(const float* x, std::span<const uint16_t> channels, int slot, std::byte* section) {
  const int count = static_cast<int>(channels.size());
  auto* words = reinterpret_cast<uint32_t*>(section) + slot;
  float min = std::numeric_limits<float>::infinity();
  float max = -min;
  for (const uint16_t channel : channels) {
    min = std::min(min, x[channel]);
    max = std::max(max, x[channel]);
  }
  const Int4Range range = Int4Range::Of(min, max);
  for (int w = 0; w < count / 8; ++w) {
    uint32_t word = 0;
    for (int i = 0; i < 8; ++i) word |= range.Code(x[channels[8 * w + i]]) << (4 * i);
    words[w * kPageTokenCount] = word;
  }
  words[count / 8 * kPageTokenCount] = range.Pack();
}

void StoreInt4Keys(const ModelSpec& spec, const PageKeys& keys, std::span<const uint16_t> channels,
                   std::byte* section) {
  std::vector<float> x(spec.head_dim);
  for (int t = keys.begin; t < keys.end; ++t) {
    ToFloat(spec.dtype, keys.rows + t * spec.row_bytes(), spec.head_dim, x.data());
    StoreInt4(x.data(), channels, t, section);
  }
}

}  // namespace spillway
#endif
