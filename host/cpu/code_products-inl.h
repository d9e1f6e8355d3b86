// Integer sums of products of codes with weights; included once per target.
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

// sum += the four byte products of each 32-bit lane; bytes of fields are
// unsigned, weights in [-30, 30]: a pair of products fits 16 bits.
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

// Sums of kRows weight rows over the keys of kTiles tiles.
template <int kRows, int kTiles>
class DotSums {
 public:
  // From first[row] on.
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

  // Fields of four dimensions, [tile]; weights of these: row r's are r * dims on.
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
  // A single row would wait for its own additions: it gets several sums.
  static constexpr int kChains = kRows == 1 ? 4 : 1;
  VI sums_[kChains][kTiles][kRows];
};

// What the page's successor has where the page has `at`. To the second level:
// the first has too few miss buffers for the bandwidth.
HWY_INLINE void PrefetchNext(const ScanPage& page, const void* at) {
  const std::byte* next = page.next != nullptr ? page.next : page.codes;
  __builtin_prefetch(next + (static_cast<const std::byte*>(at) - page.codes), /*rw=*/0,
                     /*locality=*/2);
}

// Word i of neighbouring tiles; words: of the first one's part, moved on by the
// lane.
template <int kTiles>
HWY_INLINE void LoadWord(const CodeLayout& layout, const ScanPage& page, const uint32_t* words,
                         int i, VU (&word)[kTiles]) {
  for (int t = 0; t < kTiles; ++t) {
    const uint32_t* at = words + t * layout.tile_words() + i * kTileTokenCount;
    word[t] = hn::LoadU(DU(), at);
    PrefetchNext(page, at);
  }
}

// A part of a tile, moved on by the lane.
HWY_INLINE const uint32_t* PartWords(const CodeLayout& layout, const ScanPage& page, int part,
                                     int tile, int lane) {
  return reinterpret_cast<const uint32_t*>(page.codes) + layout.tile_offset(part, tile) + lane;
}

// Integer sums of kRows weight rows over the keys of kTiles neighbouring tiles
// (of the same lanes), for one part of the codes, from first[row] on:
// out[tile][row]. With kTopOnly a field counts by its top bit alone.
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
    // Unrolled, so that shifts are immediate and sums stay in registers.
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

// Tiles scored together: two share the loads of the weights.
inline constexpr int kPair = 2;

}  // namespace HWY_NAMESPACE
}  // namespace spillway
HWY_AFTER_NAMESPACE();

#endif
