// Scores of codes: integer dot products of B-bit codes with int8 query
// weights, 16 keys at a time, then group scores as histogram bins.
#include <algorithm>
#include <bit>
#include <cstring>
#include <type_traits>

#include "host/core/histogram.h"
#include "host/core/value_code.h"
#include "host/cpu/kernels.h"

#define HWY_DISABLED_TARGETS (HWY_SSSE3 | HWY_SSE4)
#define HWY_WANT_AVX3_DL
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "host/cpu/kernels_score.cc"
#include "hwy/foreach_target.h"
//
#include "host/cpu/code_products-inl.h"
#include "host/cpu/simd_math-inl.h"
#include "hwy/highway.h"

HWY_BEFORE_NAMESPACE();
namespace spillway {
namespace HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

// DotPart() for codes of three bits, whose two parts are joined before they are multiplied: one
// word of top bits belongs to two words of low bits.
template <int kRows, int kTiles>
HWY_INLINE void DotThreeBits(const CodeLayout& layout, const ScanPage& page, int tile, int lane,
                             const int8_t* weights, const int32_t* first, VI (*out)[kRows]) {
  constexpr int kLowPositions = 4;
  const uint32_t* low_words = PartWords(layout, page, 0, tile, lane);
  const uint32_t* top_words = PartWords(layout, page, 1, tile, lane);
  const int top_count = layout.words(1);
  const auto low_mask = hn::Set(DU(), 0x03030303u);
  const auto top_mask = hn::Set(DU(), 0x04040404u);
  DotSums<kRows, kTiles> sums(first);
  for (int c = 0; c < top_count; ++c) {
    VU top[kTiles];
    LoadWord(layout, page, top_words, c, top);
#pragma GCC unroll 2
    for (int half = 0; half < 2; ++half) {
      VU low[kTiles];
      LoadWord(layout, page, low_words, 2 * c + half, low);
#pragma GCC unroll 4
      for (int p = 0; p < kLowPositions; ++p) {
        // The bit of each byte that holds the top bit of a code, which moves to bit 2.
        const int at = half * kLowPositions + p;
        VU fields[kTiles];
        for (int t = 0; t < kTiles; ++t) {
          const auto moved =
              at < 2 ? hn::ShiftLeftSame(top[t], 2 - at) : hn::ShiftRightSame(top[t], at - 2);
          fields[t] =
              hn::OrAnd(hn::And(hn::ShiftRightSame(low[t], 2 * p), low_mask), moved, top_mask);
        }
        sums.Add(p, fields, weights + (c * 2 * kLowPositions + at) * 4, layout.dims);
      }
    }
  }
  sums.Store(out);
}

// kRows sums over B-bit codes of kTiles tiles from `tile` on.
template <int kBits, int kRows, int kTiles>
HWY_INLINE void DotTile(const ScoreQuery& q, int first_row, const ScanPage& page, int tile,
                        int lane, VI (*out)[kRows]) {
  const int8_t* weights = q.weights + static_cast<int64_t>(first_row) * q.layout.dims;
  const int32_t* first = q.offset + first_row;
  if constexpr (kBits == 3) {
    DotThreeBits<kRows, kTiles>(q.layout, page, tile, lane, weights, first, out);
  } else {
    DotPart<kBits, false, kRows, kTiles>(q.layout, 0, page, tile, lane, weights, first, out);
  }
}

// Calls f(t, head, p, factor) for the kPair tiles tile + t and for kRows query heads from `first`
// on, heads in order. p and factor are the arguments of EstimatedLogit().
template <int kBits, int kRows, typename F>
HWY_INLINE void RowsLogits(const ScoreQuery& q, const ScanPage& page, int tile, int lane, int first,
                           F f) {
  const DF df;
  const hn::Rebind<hwy::bfloat16_t, DF> db;
  VI sums[kPair][kRows];
  DotTile<kBits, kRows, kPair>(q, first, page, tile, lane, sums);
#pragma GCC unroll 2
  for (int t = 0; t < kPair; ++t) {
    const auto* factors = reinterpret_cast<const hwy::bfloat16_t*>(
        page.codes + q.layout.factor_offset_bytes() + 2 * ((tile + t) * kTileTokenCount + lane));
    const auto factor = hn::PromoteTo(df, hn::LoadU(db, factors));
    PrefetchNext(page, factors);
#pragma GCC unroll 4
    for (int r = 0; r < kRows; ++r) {
      const int h = first + r;
      f(t, h, hn::Mul(hn::Set(df, q.coefficient[h]), hn::ConvertTo(df, sums[t][r])), factor);
    }
  }
}

template <int kBits, typename F>
HWY_INLINE void PairLogits(const ScoreQuery& q, const ScanPage& page, int tile, int lane, F f) {
  for (int first = 0; first < q.row_count; first += 4) {
    switch (q.row_count - first) {
      case 1:
        RowsLogits<kBits, 1>(q, page, tile, lane, first, f);
        break;
      case 2:
        RowsLogits<kBits, 2>(q, page, tile, lane, first, f);
        break;
      case 3:
        RowsLogits<kBits, 3>(q, page, tile, lane, first, f);
        break;
      default:
        RowsLogits<kBits, 4>(q, page, tile, lane, first, f);
    }
  }
}

HWY_INLINE void StoreBins(VF score, uint16_t* out) {
  const DI di;
  const hn::Rebind<uint16_t, DI> d16;
  hn::StoreU(hn::DemoteTo(d16, hn::ShiftRight<kScoreBinShift>(hn::BitCast(di, score))), d16, out);
}

// SumChains() of 16 chains.
HWY_INLINE float SumSixteen(const float* chains) {
  const hn::CappedTag<float, 8> d8;
  const hn::CappedTag<float, 4> d4;
  HWY_ALIGN float eight[8];
  const int n = static_cast<int>(hn::Lanes(d8));
  for (int i = 0; i < 8; i += n) {
    hn::Store(hn::Add(hn::LoadU(d8, chains + i), hn::LoadU(d8, chains + 8 + i)), d8, eight + i);
  }
  HWY_ALIGN float four[4];
  hn::Store(hn::Add(hn::Load(d4, eight), hn::Load(d4, eight + 4)), d4, four);
  return (four[0] + four[2]) + (four[1] + four[3]);
}

// ValueLevel() of each lane.
HWY_INLINE void StoreLevels(VF x, VF factor_square, float shrinkage, uint8_t* out) {
  const DF df;
  const hn::Rebind<uint8_t, DI> d8;
  const auto shrink =
      hn::Min(hn::Mul(factor_square, hn::Set(df, shrinkage)), hn::Set(df, kShrinkMax));
  const auto level = hn::Sub(hn::MulAdd(x, hn::Set(df, static_cast<float>(kLevelsPerOctave)),
                                        hn::Set(df, static_cast<float>(kLevelZero))),
                             shrink);
  // What is too small for an integer becomes the smallest one, and 0 here.
  const auto most = hn::Min(level, hn::Set(df, static_cast<float>(kLevelMax)));
  hn::StoreU(hn::DemoteTo(d8, hn::NearestInt(most)), d8, out);
}

// RankSums of a page as chains, one per slot of a tile. They are in memory, because heads take
// turns.
struct RankChains {
  HWY_ALIGN float weight[kGroupMax][kRankChains];
  HWY_ALIGN float error[kGroupMax][kRankChains];
};

// tile_begin and tile_end are even.
template <int kBits>
void AsymmetricBinsOf(const ScoreQuery& q, const ScanPage& page, const float* centre_logits,
                      const PageMask& mask, int tile_begin, int tile_end, uint16_t* bins,
                      uint16_t* const* head_bins, const LevelTarget& levels,
                      RankSums<float>* sums) {
  static_assert(kRankChains == kTileTokenCount);
  const DF df;
  const int n = static_cast<int>(hn::Lanes(df));
  RankChains chains;
  // The page's centre logits relative to the reference, added to each of its logits.
  float shift[kGroupMax];
  for (int h = 0; h < q.row_count; ++h) {
    shift[h] = centre_logits[h] - q.references.reference[h];
    std::fill_n(chains.weight[h], kRankChains, 0.0f);
    std::fill_n(chains.error[h], kRankChains, 0.0f);
  }
  const auto most = hn::Set(df, kFactorSquareMax);
  for (int tile = tile_begin; tile < tile_end; tile += kPair) {
    for (int lane = 0; lane < kTileTokenCount; lane += n) {
      VF score[kPair] = {hn::Zero(df), hn::Zero(df)};
      const int64_t out = (tile - tile_begin) * kTileTokenCount + lane;
      PairLogits<kBits>(q, page, tile, lane, [&](int t, int h, VF p, VF factor) HWY_ATTR {
        const auto x = hn::MulAdd(p, factor, hn::Set(df, shift[h]));
        const auto e = ScoreExp2Vec(df, x);
        if (head_bins != nullptr) StoreBins(e, head_bins[h] + out + t * kTileTokenCount);
        score[t] = hn::MulAdd(e, hn::Set(df, q.references.head_weight[h]), score[t]);
        const int slot = (tile + t) * kTileTokenCount + lane;
        const auto summed = hn::Mul(e, hn::Load(df, mask.of_slot + slot));
        float* weight = chains.weight[h] + lane;
        float* error = chains.error[h] + lane;
        hn::Store(hn::Add(hn::Load(df, weight), summed), df, weight);
        const auto square = hn::Min(hn::Mul(factor, factor), most);
        hn::Store(hn::MulAdd(summed, square, hn::Load(df, error)), df, error);
        if (levels.levels != nullptr) {
          StoreLevels(x, square, levels.shrinkage[h], levels.levels + h * kPageTokenCount + slot);
        }
      });
      for (int t = 0; t < kPair; ++t) StoreBins(score[t], bins + out + t * kTileTokenCount);
    }
  }
  for (int h = 0; h < q.row_count; ++h) {
    sums[h] = {SumSixteen(chains.weight[h]), SumSixteen(chains.error[h])};
  }
}

void AsymmetricBinsImpl(const ScoreQuery& q, const ScanPage& page, const float* centre_logits,
                        const PageMask& mask, int tile_begin, int tile_end, uint16_t* bins,
                        uint16_t* const* head_bins, const LevelTarget& levels,
                        RankSums<float>* sums) {
  const auto of = [&](auto f) {
    f(q, page, centre_logits, mask, tile_begin, tile_end, bins, head_bins, levels, sums);
  };
  switch (q.layout.width[0] + q.layout.width[1]) {
    case 1:
      return of(AsymmetricBinsOf<1>);
    case 2:
      return of(AsymmetricBinsOf<2>);
    case 3:
      return of(AsymmetricBinsOf<3>);
    default:
      return of(AsymmetricBinsOf<4>);
  }
}

template <int kBits>
void AsymmetricLogitsOf(const ScoreQuery& q, const ScanPage& page, const float* centre_logits,
                        float* logits) {
  const DF df;
  const int n = static_cast<int>(hn::Lanes(df));
  const auto limit = hn::Set(df, kScoreLogitMax);
  for (int tile = 0; tile < kTilesPerPage; tile += kPair) {
    for (int lane = 0; lane < kTileTokenCount; lane += n) {
      PairLogits<kBits>(q, page, tile, lane, [&](int t, int h, VF p, VF factor) HWY_ATTR {
        const auto x = hn::MulAdd(p, factor, hn::Set(df, centre_logits[h]));
        hn::StoreU(hn::Min(hn::Max(x, hn::Neg(limit)), limit), df,
                   logits + h * kPageTokenCount + (tile + t) * kTileTokenCount + lane);
      });
    }
  }
}

void AsymmetricLogitsImpl(const ScoreQuery& q, const ScanPage& page, const float* centre_logits,
                          float* logits) {
  switch (q.layout.width[0] + q.layout.width[1]) {
    case 1:
      return AsymmetricLogitsOf<1>(q, page, centre_logits, logits);
    case 2:
      return AsymmetricLogitsOf<2>(q, page, centre_logits, logits);
    case 3:
      return AsymmetricLogitsOf<3>(q, page, centre_logits, logits);
    default:
      return AsymmetricLogitsOf<4>(q, page, centre_logits, logits);
  }
}

void CentreLogitsImpl(const float* queries, int group, int dim, float softmax_scale,
                      const std::byte* centre, float* centre_logits) {
  const DF df;
  const hn::Rebind<hwy::bfloat16_t, DF> db;
  const int n = static_cast<int>(hn::Lanes(df));
  const auto* c = reinterpret_cast<const hwy::bfloat16_t*>(centre);
  for (int h = 0; h < group; ++h) {
    HWY_ALIGN float chains[kRankChains];
    for (int lane = 0; lane < kRankChains; lane += n) {
      auto sum = hn::Zero(df);
      for (int i = lane; i < dim; i += kRankChains) {
        sum = hn::MulAdd(hn::LoadU(df, queries + h * dim + i),
                         hn::PromoteTo(df, hn::LoadU(db, c + i)), sum);
      }
      hn::Store(sum, df, chains + lane);
    }
    centre_logits[h] = CentreLogit(SumSixteen(chains), softmax_scale);
  }
}

void WeighBinsImpl(const uint8_t* norms, int raise, int count, uint16_t* bins) {
  const hn::CappedTag<int16_t, 32> d16;
  const hn::Rebind<uint8_t, decltype(d16)> d8;
  const int n = static_cast<int>(hn::Lanes(d16));
  const auto of = [&](int x) { return hn::Set(d16, static_cast<int16_t>(x)); };
  for (int i = 0; i < count; i += n) {
    auto* const at = reinterpret_cast<int16_t*>(bins + i);
    const auto bin = hn::LoadU(d16, at);
    const auto norm = hn::PromoteTo(d16, hn::LoadU(d8, norms + i));
    const auto exponent = hn::Add(norm, of(raise - kValueExponentMax));
    auto weighed = hn::Add(bin, hn::Add(exponent, exponent));
    weighed = hn::Min(hn::Max(weighed, of(1)), of(kStrayBin - 1));
    weighed = hn::IfThenElse(hn::Eq(norm, of(kStrayNorm)), of(kStrayBin), weighed);
    hn::StoreU(hn::IfThenElse(hn::Eq(bin, of(kNotFoundBin)), bin, weighed), d16, at);
  }
}

void ExactBinsImpl(const ScoreReferences& q, const float* logits, int64_t stride, int head_count,
                   int token_count, uint16_t* bins, uint16_t* const* head_bins) {
  const DF df;
  const int n = static_cast<int>(hn::Lanes(df));
  for (int i = 0; i < token_count; i += n) {
    auto score = hn::Zero(df);
    for (int h = 0; h < head_count; ++h) {
      const auto l = hn::LoadU(df, logits + h * stride + i);
      const auto e = ScoreExp2Vec(
          df, hn::Sub(hn::Mul(l, hn::Set(df, kExpLog2E)), hn::Set(df, q.reference[h])));
      if (head_bins != nullptr) StoreBins(e, head_bins[h] + i);
      score = hn::MulAdd(e, hn::Set(df, q.head_weight[h]), score);
    }
    StoreBins(score, bins + i);
  }
}

float MaxLogitImpl(const float* logits, int64_t count, float least) {
  const DF df;
  const int64_t n = static_cast<int64_t>(hn::Lanes(df));
  auto max = hn::Set(df, least);
  int64_t i = 0;
  for (; i + n <= count; i += n) max = hn::Max(max, hn::LoadU(df, logits + i));
  float result = hn::GetLane(hn::MaxOfLanes(df, max));
  for (; i < count; ++i) result = std::max(result, logits[i]);
  return result;
}

uint64_t SumScoreMassImpl(const float* logits, int64_t count, float max) {
  const DF df;
  const DI di;
  const hn::RepartitionToWide<DI> d64;
  const int64_t n = static_cast<int64_t>(hn::Lanes(df));
  const auto one = hn::Set(df, static_cast<float>(1 << kScoreMassBits));
  auto sum = hn::Zero(d64);
  int64_t i = 0;
  for (; i + n <= count; i += n) {
    const auto e = ScoreExp2Vec(df, hn::Sub(hn::LoadU(df, logits + i), hn::Set(df, max)));
    const auto mass = hn::ConvertTo(di, hn::Mul(e, one));
    sum = hn::Add(sum, hn::Add(hn::PromoteTo(d64, hn::LowerHalf(mass)),
                               hn::PromoteTo(d64, hn::UpperHalf(hn::Half<DI>(), mass))));
  }
  auto result = static_cast<uint64_t>(hn::GetLane(hn::SumOfLanes(d64, sum)));
  for (; i < count; ++i) result += ScoreMass(logits[i], max);
  return result;
}

int64_t FilterBinsImpl(const uint16_t* bins, int64_t count, uint16_t least, uint32_t* out) {
  const hn::ScalableTag<uint16_t> d16;
  const int64_t n = static_cast<int64_t>(hn::Lanes(d16));
  const auto edge = hn::Set(d16, least);
  int64_t written = 0;
  for (int64_t i = 0; i < count; i += n) {
    if (i + n <= count && HWY_LIKELY(hn::AllTrue(d16, hn::Lt(hn::LoadU(d16, bins + i), edge)))) {
      continue;
    }
    for (int64_t j = i; j < std::min(i + n, count); ++j) {
      if (bins[j] >= least) out[written++] = static_cast<uint32_t>(j);
    }
  }
  return written;
}

int64_t FilterTokensImpl(const uint16_t* bins, uint32_t first_token, int64_t count,
                         const SampleOrder& order, const SampleLimits& limits, uint32_t* out) {
  const SampleKey& key = order.key;
  const DU du;
  const DI di;
  const hn::Rebind<uint16_t, DU> d16;
  using V16 = hn::Vec<decltype(d16)>;
  const int64_t n = static_cast<int64_t>(hn::Lanes(du));
  const auto lanes = hn::Iota(du, 0);
  const auto resident = hn::Set(du, order.resident);
  const auto not_resident = hn::Set(du, 0u - order.resident);
  const auto resident_phase = hn::Set(du, order.resident_phase);
  const auto phase = hn::Set(du, order.phase);
  // This many vectors share the loads of the limits.
  constexpr int kVectors = 4;
  int64_t written = 0;
  int64_t i = 0;
  for (; i + kVectors * n <= count; i += kVectors * n) {
    V16 bin[kVectors], limit[kVectors];
    for (int v = 0; v < kVectors; ++v) {
      bin[v] = hn::LoadU(d16, bins + i + v * n);
      limit[v] = hn::Set(d16, limits.limit[0]);
    }
    for (int e = 1; e < limits.count; ++e) {
      const auto edge = hn::Set(d16, limits.edge[e]);
      const auto next = hn::Set(d16, limits.limit[e]);
      for (int v = 0; v < kVectors; ++v) {
        limit[v] = hn::IfThenElse(hn::Lt(bin[v], edge), limit[v], next);
      }
    }
    uint64_t kept = 0;
    for (int v = 0; v < kVectors; ++v) {
      const auto first = hn::Set(du, first_token + static_cast<uint32_t>(i + v * n));
      const auto token = hn::Add(first, lanes);
      auto h = hn::Add(hn::Mul(token, hn::Set(du, key.multiplier)), hn::Set(du, key.offset));
      h = hn::Xor(h, hn::ShiftRight<16>(h));
      h = hn::Xor(hn::Mul(h, hn::Set(du, 0x85EBCA6Bu)), hn::Set(du, key.mask));
      h = hn::Mul(hn::Xor(h, hn::ShiftRight<13>(h)), hn::Set(du, 0xC2B2AE35u));
      h = hn::Xor(h, hn::ShiftRight<16>(h));
      // SamplePlace(): each of the two parts of the order is rotated within itself.
      const auto in_resident = hn::Lt(h, resident);
      const auto turn = hn::IfThenElse(in_resident, resident_phase, phase);
      const auto wraps = hn::Lt(hn::IfThenElse(in_resident, h, hn::Sub(h, resident)), turn);
      const auto back = hn::IfThenElse(in_resident, resident, not_resident);
      h = hn::Add(hn::Sub(h, turn), hn::IfThenElseZero(wraps, back));
      const auto upper = hn::DemoteTo(d16, hn::BitCast(di, hn::ShiftRight<kSampleLimitShift>(h)));
      // Writes one bit per lane, in whole bytes, up to eight of them.
      uint8_t bytes[8] = {};
      hn::StoreMaskBits(d16, hn::Lt(upper, limit[v]), bytes);
      uint64_t bits;
      std::memcpy(&bits, bytes, 8);
      kept |= bits << (v * n);
    }
    // The first two are written without a branch, which could not be predicted; there are seldom
    // more. Both fit: written <= i.
    for (int k = 0; k < 2; ++k) {
      out[written] = static_cast<uint32_t>(i + std::countr_zero(kept));
      written += kept != 0;
      kept &= kept - 1;
    }
    for (; kept != 0; kept &= kept - 1) {
      out[written++] = static_cast<uint32_t>(i + std::countr_zero(kept));
    }
  }
  for (; i < count; ++i) {
    const uint32_t x = SamplePlace(order, first_token + static_cast<uint32_t>(i));
    if (x >> kSampleLimitShift < limits.Of(bins[i])) out[written++] = static_cast<uint32_t>(i);
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
HWY_EXPORT(CentreLogitsImpl);
HWY_EXPORT(WeighBinsImpl);
HWY_EXPORT(ExactBinsImpl);
HWY_EXPORT(MaxLogitImpl);
HWY_EXPORT(SumScoreMassImpl);
HWY_EXPORT(FilterBinsImpl);
HWY_EXPORT(FilterTokensImpl);

void CentreLogits(const float* queries, int group, int dim, float softmax_scale,
                  const std::byte* centre, float* centre_logits) {
  HWY_DYNAMIC_DISPATCH(CentreLogitsImpl)(queries, group, dim, softmax_scale, centre, centre_logits);
}
void AsymmetricLogits(const ScoreQuery& query, const ScanPage& page, const float* centre_logits,
                      float* logits) {
  HWY_DYNAMIC_DISPATCH(AsymmetricLogitsImpl)(query, page, centre_logits, logits);
}
void AsymmetricBins(const ScoreQuery& query, const ScanPage& page, const float* centre_logits,
                    const PageMask& mask, int tile_begin, int tile_end, uint16_t* bins,
                    uint16_t* const* head_bins, const LevelTarget& levels, RankSums<float>* sums) {
  HWY_DYNAMIC_DISPATCH(AsymmetricBinsImpl)
  (query, page, centre_logits, mask, tile_begin, tile_end, bins, head_bins, levels, sums);
}
void WeighBins(const uint8_t* norms, int raise, int count, uint16_t* bins) {
  HWY_DYNAMIC_DISPATCH(WeighBinsImpl)(norms, raise, count, bins);
}
void ExactBins(const ScoreReferences& references, const float* logits, int64_t stride,
               int head_count, int token_count, uint16_t* bins, uint16_t* const* head_bins) {
  HWY_DYNAMIC_DISPATCH(ExactBinsImpl)
  (references, logits, stride, head_count, token_count, bins, head_bins);
}
float MaxLogit(const float* logits, int64_t count, float least) {
  return HWY_DYNAMIC_DISPATCH(MaxLogitImpl)(logits, count, least);
}
uint64_t SumScoreMass(const float* logits, int64_t count, float max) {
  return HWY_DYNAMIC_DISPATCH(SumScoreMassImpl)(logits, count, max);
}
int64_t FilterBins(const uint16_t* bins, int64_t count, uint16_t least, uint32_t* out) {
  return HWY_DYNAMIC_DISPATCH(FilterBinsImpl)(bins, count, least, out);
}
int64_t FilterTokens(const uint16_t* bins, uint32_t first_token, int64_t count,
                     const SampleOrder& order, const SampleLimits& limits, uint32_t* out) {
  return HWY_DYNAMIC_DISPATCH(FilterTokensImpl)(bins, first_token, count, order, limits, out);
}
}  // namespace spillway
#endif
