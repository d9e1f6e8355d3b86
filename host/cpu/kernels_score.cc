// Scores of codes: integer dot products of B-bit codes with int8 query
// weights, 16 keys at a time, then group scores as histogram bins.
#include <algorithm>
#include <bit>
#include <cstring>
#include <type_traits>

#include "host/core/histogram.h"
#include "host/cpu/kernels.h"

#define HWY_DISABLED_TARGETS (HWY_SSSE3 | HWY_SSE4)
#define HWY_WANT_AVX3_DL
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "host/cpu/kernels_score.cc"
#include "hwy/foreach_target.h"
//
#include "host/cpu/simd_math-inl.h"
#include "hwy/highway.h"

HWY_BEFORE_NAMESPACE();
namespace spillway {
namespace HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

using DF = hn::CappedTag<float, kTileTokenCount>;
using DI = hn::RebindToSigned<DF>;
using DU = hn::RebindToUnsigned<DF>;
using VF = hn::Vec<DF>;
using VI = hn::Vec<DI>;
using VU = hn::Vec<DU>;

// sum += the four byte products of each 32-bit lane; fields are in [0, 15],
// weights in [-16, 16].
HWY_INLINE VI DotBytes(VI sum, VU fields, int32_t weights) {
#if HWY_TARGET == HWY_AVX3_DL
  // By name: Highway 1.0.3 checks the processor for AVX512-VNNI under this
  // target but does not tell the compiler, so the intrinsic does not inline.
  asm("vpdpbusd %2, %1, %0" : "+v"(sum.raw) : "v"(fields.raw), "v"(_mm512_set1_epi32(weights)));
  return sum;
#elif HWY_TARGET == HWY_AVX3
  const __m512i pairs = _mm512_maddubs_epi16(fields.raw, _mm512_set1_epi32(weights));
  return hn::Add(sum, VI{_mm512_madd_epi16(pairs, _mm512_set1_epi16(1))});
#elif HWY_TARGET == HWY_AVX2
  const __m256i pairs = _mm256_maddubs_epi16(fields.raw, _mm256_set1_epi32(weights));
  return hn::Add(sum, VI{_mm256_madd_epi16(pairs, _mm256_set1_epi16(1))});
#else
  const DI di;
  const auto byte = hn::Set(di, 0xFF);
  auto f = hn::BitCast(di, fields);
  for (int b = 0; b < 4; ++b) {
    const auto weight = hn::Set(di, static_cast<int8_t>(weights >> (8 * b)));
    sum = hn::Add(sum, hn::Mul(hn::And(f, byte), weight));
    f = hn::ShiftRight<8>(f);
  }
  return sum;
#endif
}

// Step kStep of a word: the codes of dimensions 32 w + 8 b + kStep in byte b.
template <int kPlanes, int kStep>
HWY_INLINE VU Fields(const VU* plane) {
  const DU du;
  VU fields = hn::And(hn::ShiftRight<kStep>(plane[0]), hn::Set(du, 0x01010101u));
  const auto add = [&](auto index) HWY_ATTR {
    constexpr int p = decltype(index)::value;
    if constexpr (p < kPlanes) {
      VU bits;
      if constexpr (p > kStep) {
        bits = hn::ShiftLeft<p - kStep>(plane[p]);
      } else {
        bits = hn::ShiftRight<kStep - p>(plane[p]);
      }
      fields = hn::OrAnd(fields, bits, hn::Set(du, 0x01010101u << p));
    }
  };
  add(std::integral_constant<int, 1>());
  add(std::integral_constant<int, 2>());
  add(std::integral_constant<int, 3>());
  return fields;
}

// Integer sums of kRows weight rows over the keys of a tile's lanes.
template <int kPlanes, int kRows>
HWY_INLINE void DotTile(const ScoreQuery& q, int first_row, const uint32_t* tile, VI* out) {
  const DU du;
  const DI di;
  const int words = q.layout.words;
  const int64_t stride = q.layout.plane_stride_words();
  const int8_t* weights = q.weights + static_cast<int64_t>(first_row) * words * 32;
  VI sums[kRows];
  for (int r = 0; r < kRows; ++r) sums[r] = hn::Zero(di);
  for (int w = 0; w < words; ++w) {
    VU plane[kPlanes];
    for (int p = 0; p < kPlanes; ++p) {
      plane[p] = hn::LoadU(du, tile + p * stride + w * kTileTokenCount);
    }
    const auto step = [&](auto index) HWY_ATTR {
      constexpr int s = decltype(index)::value;
      const VU fields = Fields<kPlanes, s>(plane);
      for (int r = 0; r < kRows; ++r) {
        int32_t weight;
        std::memcpy(&weight, weights + (static_cast<int64_t>(r) * words + w) * 32 + s * 4, 4);
        sums[r] = DotBytes(sums[r], fields, weight);
      }
    };
    step(std::integral_constant<int, 0>());
    step(std::integral_constant<int, 1>());
    step(std::integral_constant<int, 2>());
    step(std::integral_constant<int, 3>());
    step(std::integral_constant<int, 4>());
    step(std::integral_constant<int, 5>());
    step(std::integral_constant<int, 6>());
    step(std::integral_constant<int, 7>());
  }
  for (int r = 0; r < kRows; ++r) out[r] = sums[r];
}

template <int kPlanes>
HWY_INLINE void DotRows(const ScoreQuery& q, int first, int count, const uint32_t* tile, VI* sums) {
  switch (count) {
    case 1:
      return DotTile<kPlanes, 1>(q, first, tile, sums);
    case 2:
      return DotTile<kPlanes, 2>(q, first, tile, sums);
    case 3:
      return DotTile<kPlanes, 3>(q, first, tile, sums);
    default:
      return DotTile<kPlanes, 4>(q, first, tile, sums);
  }
}

// Calls f(row, logits) for every query head, in order.
template <int kPlanes, typename F>
HWY_INLINE void TileLogits(const ScoreQuery& q, const uint32_t* tile, const uint16_t* factors,
                           F f) {
  const DF df;
  const DI di;
  const hn::Rebind<hwy::bfloat16_t, DF> db;
  const auto factor =
      hn::PromoteTo(df, hn::LoadU(db, reinterpret_cast<const hwy::bfloat16_t*>(factors)));
  const auto limit = hn::Set(df, 1.0e38f);
  VI sums[4];
  for (int first = 0; first < q.row_count; first += 4) {
    const int count = std::min(4, q.row_count - first);
    DotRows<kPlanes>(q, first, count, tile, sums);
    for (int r = 0; r < count; ++r) {
      const int h = first + r;
      const auto integer = hn::Add(hn::ShiftLeft<1>(sums[r]), hn::Set(di, q.offset[h]));
      auto l = hn::Mul(hn::Mul(hn::Set(df, q.coefficient[h]), hn::ConvertTo(df, integer)), factor);
      f(h, hn::Min(hn::Max(l, hn::Neg(limit)), limit));
    }
  }
}

HWY_INLINE VF Exponential(VF logit, float reference) {
  const DF df;
  return ExpVec(df, hn::Min(hn::Sub(logit, hn::Set(df, reference)), hn::Set(df, 20.0f)));
}

HWY_INLINE void StoreBins(VF score, uint16_t* out) {
  const DI di;
  const hn::Rebind<uint16_t, DI> d16;
  hn::StoreU(hn::DemoteTo(d16, hn::ShiftRight<kScoreBinShift>(hn::BitCast(di, score))), d16, out);
}

template <int kPlanes>
void AsymmetricBinsPlanes(const ScoreQuery& q, const std::byte* page, int tile_begin, int tile_end,
                          uint16_t* bins, uint16_t* const* head_bins) {
  const DF df;
  const int n = static_cast<int>(hn::Lanes(df));
  const auto* words = reinterpret_cast<const uint32_t*>(page);
  const auto* factors = reinterpret_cast<const uint16_t*>(page + q.layout.factor_offset_bytes());
  for (int tile = tile_begin; tile < tile_end; ++tile) {
    const int64_t at = static_cast<int64_t>(tile) * q.layout.words * kTileTokenCount;
    for (int lane = 0; lane < kTileTokenCount; lane += n) {
      auto score = hn::Zero(df);
      const int64_t out = (tile - tile_begin) * kTileTokenCount + lane;
      TileLogits<kPlanes>(q, words + at + lane, factors + tile * kTileTokenCount + lane,
                          [&](int h, VF l) {
                            const auto e = Exponential(l, q.reference[h]);
                            if (head_bins != nullptr) StoreBins(e, head_bins[h] + out);
                            score = hn::Add(score, e);
                          });
      StoreBins(score, bins + out);
    }
  }
}

void AsymmetricBinsImpl(const ScoreQuery& q, const std::byte* page, int tile_begin, int tile_end,
                        uint16_t* bins, uint16_t* const* head_bins) {
  switch (q.planes) {
    case 1:
      return AsymmetricBinsPlanes<1>(q, page, tile_begin, tile_end, bins, head_bins);
    case 2:
      return AsymmetricBinsPlanes<2>(q, page, tile_begin, tile_end, bins, head_bins);
    case 3:
      return AsymmetricBinsPlanes<3>(q, page, tile_begin, tile_end, bins, head_bins);
    default:
      return AsymmetricBinsPlanes<4>(q, page, tile_begin, tile_end, bins, head_bins);
  }
}

template <int kPlanes>
void AsymmetricLogitsPlanes(const ScoreQuery& q, const std::byte* page, float* logits) {
  const DF df;
  const int n = static_cast<int>(hn::Lanes(df));
  const auto* words = reinterpret_cast<const uint32_t*>(page);
  const auto* factors = reinterpret_cast<const uint16_t*>(page + q.layout.factor_offset_bytes());
  for (int tile = 0; tile < kTilesPerPage; ++tile) {
    const int64_t at = static_cast<int64_t>(tile) * q.layout.words * kTileTokenCount;
    for (int lane = 0; lane < kTileTokenCount; lane += n) {
      const int slot = tile * kTileTokenCount + lane;
      TileLogits<kPlanes>(q, words + at + lane, factors + slot, [&](int h, VF l) {
        hn::StoreU(l, df, logits + h * kPageTokenCount + slot);
      });
    }
  }
}

void AsymmetricLogitsImpl(const ScoreQuery& q, const std::byte* page, float* logits) {
  switch (q.planes) {
    case 1:
      return AsymmetricLogitsPlanes<1>(q, page, logits);
    case 2:
      return AsymmetricLogitsPlanes<2>(q, page, logits);
    case 3:
      return AsymmetricLogitsPlanes<3>(q, page, logits);
    default:
      return AsymmetricLogitsPlanes<4>(q, page, logits);
  }
}

// Reads the top plane only.
void HammingBinsImpl(const ScoreQuery& q, const std::byte* page, int tile_begin, int tile_end,
                     uint16_t* bins) {
  const DI di;
  const hn::Rebind<uint16_t, DI> d16;
  const int n = static_cast<int>(hn::Lanes(di));
  const auto* words = reinterpret_cast<const uint32_t*>(page) +
                      (q.layout.planes - 1) * q.layout.plane_stride_words();
  for (int tile = tile_begin; tile < tile_end; ++tile) {
    const int64_t at = static_cast<int64_t>(tile) * q.layout.words * kTileTokenCount;
    for (int lane = 0; lane < kTileTokenCount; lane += n) {
      VI sum;
      DotTile<1, 1>(q, 0, words + at + lane, &sum);
      hn::StoreU(hn::DemoteTo(d16, hn::Add(sum, hn::Set(di, q.offset[0]))), d16,
                 bins + (tile - tile_begin) * kTileTokenCount + lane);
    }
  }
}

void ExactBinsImpl(const float* logits, int64_t stride, int head_count, const float* reference,
                   int token_count, uint16_t* bins, uint16_t* const* head_bins) {
  const DF df;
  const int n = static_cast<int>(hn::Lanes(df));
  for (int i = 0; i < token_count; i += n) {
    auto score = hn::Zero(df);
    for (int h = 0; h < head_count; ++h) {
      const auto e = Exponential(hn::LoadU(df, logits + h * stride + i), reference[h]);
      if (head_bins != nullptr) StoreBins(e, head_bins[h] + i);
      score = hn::Add(score, e);
    }
    StoreBins(score, bins + i);
  }
}

int64_t FilterTokensImpl(const uint16_t* bins, uint32_t first_token, int64_t count,
                         uint16_t near_bin, const SampleKey& key, uint32_t phase,
                         uint64_t far_threshold, uint32_t* out) {
  const DU du;
  const hn::Rebind<uint16_t, DU> d16;
  const int64_t n = static_cast<int64_t>(hn::Lanes(du));
  const auto near = hn::Set(du, near_bin);
  const bool everything = far_threshold > 0xFFFFFFFFu;
  const auto far = hn::Set(du, static_cast<uint32_t>(far_threshold));
  const auto lanes = hn::Iota(du, 0);
  int64_t written = 0;
  int64_t i = 0;
  for (; i + n <= count; i += n) {
    auto token = hn::Add(hn::Set(du, first_token + static_cast<uint32_t>(i)), lanes);
    auto h = hn::Add(hn::Mul(token, hn::Set(du, key.multiplier)), hn::Set(du, key.offset));
    h = hn::Xor(h, hn::ShiftRight<16>(h));
    h = hn::Xor(hn::Mul(h, hn::Set(du, 0x85EBCA6Bu)), hn::Set(du, key.mask));
    h = hn::Mul(hn::Xor(h, hn::ShiftRight<13>(h)), hn::Set(du, 0xC2B2AE35u));
    h = hn::Sub(hn::Xor(h, hn::ShiftRight<16>(h)), hn::Set(du, phase));
    const auto bin = hn::PromoteTo(du, hn::LoadU(d16, bins + i));
    auto keep = hn::Or(hn::Not(hn::Lt(bin, near)), hn::Lt(h, far));
    if (everything) keep = hn::Eq(bin, bin);
    if (HWY_LIKELY(hn::AllFalse(du, keep))) continue;
    const auto position = hn::Add(hn::Set(du, static_cast<uint32_t>(i)), lanes);
    // Compressed in a register: compressing stores are microcode on some CPUs.
    // The whole vector fits, as written <= i.
    hn::StoreU(hn::Compress(position, keep), du, out + written);
    written += static_cast<int64_t>(hn::CountTrue(du, keep));
  }
  for (; i < count; ++i) {
    const uint32_t x = TokenHash(key, first_token + static_cast<uint32_t>(i)) - phase;
    if (bins[i] >= near_bin || x < far_threshold) out[written++] = static_cast<uint32_t>(i);
  }
  return written;
}

}  // namespace HWY_NAMESPACE
}  // namespace spillway
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace spillway {
HWY_EXPORT(AsymmetricLogitsImpl);
HWY_EXPORT(AsymmetricBinsImpl);
HWY_EXPORT(HammingBinsImpl);
HWY_EXPORT(ExactBinsImpl);
HWY_EXPORT(FilterTokensImpl);

void AsymmetricLogits(const ScoreQuery& query, const std::byte* page, float* logits) {
  HWY_DYNAMIC_DISPATCH(AsymmetricLogitsImpl)(query, page, logits);
}
void AsymmetricBins(const ScoreQuery& query, const std::byte* page, int tile_begin, int tile_end,
                    uint16_t* bins, uint16_t* const* head_bins) {
  HWY_DYNAMIC_DISPATCH(AsymmetricBinsImpl)(query, page, tile_begin, tile_end, bins, head_bins);
}
void HammingBins(const ScoreQuery& query, const std::byte* page, int tile_begin, int tile_end,
                 uint16_t* bins) {
  HWY_DYNAMIC_DISPATCH(HammingBinsImpl)(query, page, tile_begin, tile_end, bins);
}
void ExactBins(const float* logits, int64_t stride, int head_count, const float* reference,
               int token_count, uint16_t* bins, uint16_t* const* head_bins) {
  HWY_DYNAMIC_DISPATCH(ExactBinsImpl)
  (logits, stride, head_count, reference, token_count, bins, head_bins);
}
int64_t FilterTokens(const uint16_t* bins, uint32_t first_token, int64_t count, uint16_t near_bin,
                     const SampleKey& key, uint32_t phase, uint64_t far_threshold, uint32_t* out) {
  return HWY_DYNAMIC_DISPATCH(FilterTokensImpl)(bins, first_token, count, near_bin, key, phase,
                                                far_threshold, out);
}
}  // namespace spillway
#endif
