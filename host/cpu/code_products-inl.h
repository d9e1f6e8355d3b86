// Integer sums of products of codes and weights. Included once per SIMD target.
#if defined(SPILLWAY_CODE_PRODUCTS_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef SPILLWAY_CODE_PRODUCTS_INL_H_
#undef SPILLWAY_CODE_PRODUCTS_INL_H_
#else
#define SPILLWAY_CODE_PRODUCTS_INL_H_
#endif

#include <cstring>

#include "host/cpu/kernels.h"
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

// sum += the four byte products of each 32-bit lane. Bytes of fields are unsigned. A pair of
// products fits 16 bits: weights are in [-30, 30], or fields are at most 3.
HWY_INLINE VI DotBytes(VI sum, VU fields, int32_t weights) {
#if HWY_TARGET == HWY_AVX3_DL
  // As assembly: Highway 1.0.3 checks the processor for AVX512-VNNI under this target but does not
  // tell the compiler, so the intrinsic would not inline.
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

// Sums for kRows rows of weights over the keys of kTiles tiles.
template <int kRows, int kTiles>
class DotSums {
 public:
  // The sums of row r start at first[r].
  HWY_INLINE explicit DotSums(const int32_t* first) {
    const DI di;
    for (int chain = 0; chain < kChains; ++chain) {
      for (int t = 0; t < kTiles; ++t) {
        for (int r = 0; r < kRows; ++r) {
          sums_[chain][t][r] = chain == 0 ? hn::Set(di, first[r]) : hn::Zero(di);
        }
      }
    }
  }

  // Adds the products of four dimensions. fields: [tile]. The weights of row r begin r * dims after
  // `weights`.
  HWY_INLINE void Add(int position, const VU* fields, const int8_t* weights, int dims) {
    for (int r = 0; r < kRows; ++r) {
      int32_t weight;
      std::memcpy(&weight, weights + r * dims, 4);
      for (int t = 0; t < kTiles; ++t) {
        VI& sum = sums_[position % kChains][t][r];
        sum = DotBytes(sum, fields[t], weight);
      }
    }
  }

  HWY_INLINE void Store(VI (*out)[kRows]) const {
    for (int t = 0; t < kTiles; ++t) {
      for (int r = 0; r < kRows; ++r) {
        out[t][r] = sums_[0][t][r];
        for (int chain = 1; chain < kChains; ++chain) {
          out[t][r] = hn::Add(out[t][r], sums_[chain][t][r]);
        }
      }
    }
  }

 private:
  // With a single row, each addition would wait for the one before. So it has several sums.
  static constexpr int kChains = kRows == 1 ? 4 : 1;
  VI sums_[kChains][kTiles][kRows];
};

// Prefetches from the next page the data at the same offset as `at` in this page. Into the
// second-level cache: the first level has too few miss buffers for the bandwidth.
HWY_INLINE void PrefetchNext(const ScanPage& page, const void* at) {
  const std::byte* next = page.next != nullptr ? page.next : page.codes;
  __builtin_prefetch(next + (static_cast<const std::byte*>(at) - page.codes), /*rw=*/0,
                     /*locality=*/2);
}

// Loads word i of kTiles neighbouring tiles. words: PartWords() of the first tile.
template <int kTiles>
HWY_INLINE void LoadWord(const CodeLayout& layout, const ScanPage& page, const uint32_t* words,
                         int i, VU (&word)[kTiles]) {
  for (int t = 0; t < kTiles; ++t) {
    const uint32_t* at = words + t * layout.tile_words() + i * kTileTokenCount;
    word[t] = hn::LoadU(DU(), at);
    PrefetchNext(page, at);
  }
}

// The words of a part of a tile, from `lane` on.
HWY_INLINE const uint32_t* PartWords(const CodeLayout& layout, const ScanPage& page, int part,
                                     int tile, int lane) {
  return reinterpret_cast<const uint32_t*>(page.codes) + layout.tile_offset(part, tile) + lane;
}

// Integer sums for kRows rows of weights over the keys of kTiles neighbouring tiles (the same lanes
// of each), for one part of the codes: out[tile][row]. Row r starts at first[r]. With kTopOnly,
// only the top bit of each field counts.
template <int kWidth, bool kTopOnly, int kRows, int kTiles>
HWY_INLINE void DotPart(const CodeLayout& layout, int part, const ScanPage& page, int tile,
                        int lane, const int8_t* weights, const int32_t* first, VI (*out)[kRows]) {
  const uint32_t* words = PartWords(layout, page, part, tile, lane);
  const int count = layout.words(part);
  constexpr int kPositions = 8 / kWidth;
  constexpr int kFirstBit = kTopOnly ? kWidth - 1 : 0;
  const auto mask = hn::Set(DU(), (kTopOnly ? 1u : (1u << kWidth) - 1) * uint32_t{0x01010101u});
  DotSums<kRows, kTiles> sums(first);
  for (int c = 0; c < count; ++c) {
    VU word[kTiles];
    LoadWord(layout, page, words, c, word);
    // Unrolled, so that shift counts are constants and sums stay in registers.
#pragma GCC unroll 8
    for (int p = 0; p < kPositions; ++p) {
      VU fields[kTiles];
      for (int t = 0; t < kTiles; ++t) {
        fields[t] = hn::And(hn::ShiftRightSame(word[t], kWidth * p + kFirstBit), mask);
      }
      sums.Add(p, fields, weights + (c * kPositions + p) * 4, layout.dims);
    }
  }
  sums.Store(out);
}

// Tiles that are scored together: two tiles share the loads of the weights.
inline constexpr int kPair = 2;

}  // namespace HWY_NAMESPACE
}  // namespace spillway
HWY_AFTER_NAMESPACE();

#endif
