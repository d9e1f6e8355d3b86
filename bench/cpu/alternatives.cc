#include "bench/cpu/alternatives.h"

#include <immintrin.h>

#include <algorithm>

// The compiler may use these instructions in this file's marked functions
// only; AlternativesSupported() is asked before they run.
#define SPILLWAY_AVX512 __attribute__((target("avx512f,avx512bw,avx512vl,avx512vpopcntdq")))

namespace spillway::bench {
namespace {

constexpr int kTiles = 8;
constexpr int kLanes = 16;
constexpr int kWords = 4;
constexpr int kPlaneWords = kTiles * kWords * kLanes;

}  // namespace

bool AlternativesSupported() {
  return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
         __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512vpopcntdq");
}

PopcountQuery MakePopcountQuery(const uint8_t* signs, const int8_t* weights) {
  PopcountQuery q = {};
  for (int r = 0; r < kGroup; ++r) {
    for (int j = 0; j < kDims; ++j) {
      q.signs[r][j / 32] |= uint32_t{signs[r * kDims + j]} << (j % 32);
      const uint32_t level = static_cast<uint32_t>(weights[r * kDims + j] + 15) / 2;
      for (int p = 0; p < 4; ++p) q.planes[r][p][j / 32] |= ((level >> p) & 1u) << (j % 32);
    }
  }
  return q;
}

NibbleQuery MakeNibbleQuery(const uint8_t* signs, const int8_t* weights) {
  NibbleQuery q = {};
  // A key bit adds the query heads that have it, else those that have not;
  // four dimensions of four heads stay within [0, 16]. Four weights of 15 stay
  // within [-60, 60], so a bias of 60 makes two look-ups fit a byte.
  q.asymmetric_bias = 16 * 2 * 60;
  for (int byte = 0; byte < 16; ++byte) {
    for (int half = 0; half < 2; ++half) {
      for (int pattern = 0; pattern < 16; ++pattern) {
        int matches = 0;
        for (int r = 0; r < kGroup; ++r) {
          int sum = 60;
          for (int b = 0; b < 4; ++b) {
            const int at = r * kDims + 8 * byte + 4 * half + b;
            const int bit = (pattern >> b) & 1;
            matches += bit == signs[at];
            sum += bit * weights[at];
          }
          q.asymmetric[r][byte][half][pattern] = static_cast<uint8_t>(sum);
        }
        q.hamming[byte][half][pattern] = static_cast<uint8_t>(matches);
      }
    }
  }
  return q;
}

SPILLWAY_AVX512 void HammingPopcount(const PopcountQuery& query, const uint32_t* tiled,
                                     uint16_t* matches) {
  for (int tile = 0; tile < kTiles; ++tile) {
    __m512i differing = _mm512_setzero_si512();
    for (int w = 0; w < kWords; ++w) {
      const __m512i key = _mm512_loadu_si512(tiled + (tile * kWords + w) * kLanes);
      for (int r = 0; r < kGroup; ++r) {
        const __m512i sign = _mm512_set1_epi32(static_cast<int>(query.signs[r][w]));
        differing = _mm512_add_epi32(differing, _mm512_popcnt_epi32(_mm512_xor_si512(key, sign)));
      }
    }
    const __m512i same = _mm512_sub_epi32(_mm512_set1_epi32(kGroup * kDims), differing);
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(matches + tile * kLanes),
                        _mm512_cvtepi32_epi16(same));
  }
}

SPILLWAY_AVX512 void AsymmetricPopcount(const PopcountQuery& query, const uint32_t* tiled,
                                        int32_t* sums) {
  // weight = 2 level - 15, so sum weight u = 2 sum level u - 15 sum u.
  for (int tile = 0; tile < kTiles; ++tile) {
    __m512i keys[2][kWords];
    __m512i total = _mm512_setzero_si512();
    for (int w = 0; w < kWords; ++w) {
      for (int p = 0; p < 2; ++p) {
        keys[p][w] = _mm512_loadu_si512(tiled + p * kPlaneWords + (tile * kWords + w) * kLanes);
        total = _mm512_add_epi32(total, _mm512_slli_epi32(_mm512_popcnt_epi32(keys[p][w]), p));
      }
    }
    const __m512i centre = _mm512_mullo_epi32(total, _mm512_set1_epi32(15));
    for (int r = 0; r < kGroup; ++r) {
      __m512i sum = _mm512_setzero_si512();
      for (int level = 3; level >= 0; --level) {
        __m512i part[2] = {_mm512_setzero_si512(), _mm512_setzero_si512()};
        for (int w = 0; w < kWords; ++w) {
          const __m512i bits = _mm512_set1_epi32(static_cast<int>(query.planes[r][level][w]));
          for (int p = 0; p < 2; ++p) {
            part[p] =
                _mm512_add_epi32(part[p], _mm512_popcnt_epi32(_mm512_and_si512(keys[p][w], bits)));
          }
        }
        sum = _mm512_add_epi32(_mm512_slli_epi32(sum, 1),
                               _mm512_add_epi32(part[0], _mm512_slli_epi32(part[1], 1)));
      }
      _mm512_storeu_si512(sums + r * 128 + tile * kLanes,
                          _mm512_sub_epi32(_mm512_slli_epi32(sum, 1), centre));
    }
  }
}

SPILLWAY_AVX512 void FinishLogits(const int32_t* sums, float coefficient, const uint16_t* factors,
                                  float* logits) {
  const __m512 scale = _mm512_set1_ps(coefficient);
  for (int i = 0; i < 128; i += kLanes) {
    const __m256i half = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(factors + i));
    const __m512 factor = _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(half), 16));
    for (int r = 0; r < kGroup; ++r) {
      const __m512i sum = _mm512_loadu_si512(sums + r * 128 + i);
      const __m512 value = _mm512_cvtepi32_ps(_mm512_slli_epi32(sum, 1));
      _mm512_storeu_ps(logits + r * 128 + i, _mm512_mul_ps(_mm512_mul_ps(scale, value), factor));
    }
  }
}

void TileForPopcount(const uint8_t* codes, int planes, uint32_t* tiled) {
  std::fill_n(tiled, planes * kPlaneWords, 0u);
  for (int p = 0; p < planes; ++p) {
    for (int key = 0; key < 128; ++key) {
      for (int j = 0; j < kDims; ++j) {
        tiled[p * kPlaneWords + (key / kLanes * kWords + j / 32) * kLanes + key % kLanes] |=
            ((codes[key * kDims + j] >> p) & 1u) << (j % 32);
      }
    }
  }
}

void TileForNibbles(const uint8_t* codes, int planes, uint8_t* tiled) {
  std::fill_n(tiled, planes * kPlaneBytes, uint8_t{0});
  for (int p = 0; p < planes; ++p) {
    for (int key = 0; key < 128; ++key) {
      for (int j = 0; j < kDims; ++j) {
        tiled[((p * 2 + key / 64) * 16 + j / 8) * 64 + key % 64] |=
            static_cast<uint8_t>(((codes[key * kDims + j] >> p) & 1u) << (j % 8));
      }
    }
  }
}

namespace {

// Sums over bytes of dimensions of two look-ups each, as 16-bit numbers of the
// even and of the odd keys.
SPILLWAY_AVX512 inline void LookUp(const uint8_t (*tables)[2][16], const uint8_t* block,
                                   __m512i& even, __m512i& odd) {
  const __m512i low_mask = _mm512_set1_epi8(15);
  __m512i both = _mm512_setzero_si512();
  __m512i high_bytes = _mm512_setzero_si512();
  for (int byte = 0; byte < 16; ++byte) {
    const __m512i codes = _mm512_loadu_si512(block + byte * 64);
    const __m512i low = _mm512_and_si512(codes, low_mask);
    const __m512i high = _mm512_and_si512(_mm512_srli_epi16(codes, 4), low_mask);
    const __m512i low_table =
        _mm512_broadcast_i32x4(_mm_load_si128(reinterpret_cast<const __m128i*>(tables[byte][0])));
    const __m512i high_table =
        _mm512_broadcast_i32x4(_mm_load_si128(reinterpret_cast<const __m128i*>(tables[byte][1])));
    const __m512i found =
        _mm512_add_epi8(_mm512_shuffle_epi8(low_table, low), _mm512_shuffle_epi8(high_table, high));
    both = _mm512_add_epi16(both, found);
    high_bytes = _mm512_add_epi16(high_bytes, _mm512_srli_epi16(found, 8));
  }
  even = _mm512_sub_epi16(both, _mm512_slli_epi16(high_bytes, 8));
  odd = high_bytes;
}

// Interleaves even and odd keys back into key order: 32 16-bit numbers each.
SPILLWAY_AVX512 inline void Interleave(__m512i even, __m512i odd, __m512i& first, __m512i& second) {
  const __m512i low = _mm512_unpacklo_epi16(even, odd);
  const __m512i high = _mm512_unpackhi_epi16(even, odd);
  const __m512i a = _mm512_setr_epi64(0, 1, 8, 9, 2, 3, 10, 11);
  const __m512i b = _mm512_setr_epi64(4, 5, 12, 13, 6, 7, 14, 15);
  first = _mm512_permutex2var_epi64(low, a, high);
  second = _mm512_permutex2var_epi64(low, b, high);
}

}  // namespace

SPILLWAY_AVX512 void HammingNibbles(const NibbleQuery& query, const uint8_t* tiled,
                                    uint16_t* matches) {
  for (int block = 0; block < 2; ++block) {
    __m512i even;
    __m512i odd;
    LookUp(query.hamming, tiled + block * 16 * 64, even, odd);
    __m512i first;
    __m512i second;
    Interleave(even, odd, first, second);
    _mm512_storeu_si512(matches + block * 64, first);
    _mm512_storeu_si512(matches + block * 64 + 32, second);
  }
}

SPILLWAY_AVX512 void AsymmetricNibbles(const NibbleQuery& query, const uint8_t* tiled,
                                       int32_t* sums) {
  const __m512i bias = _mm512_set1_epi16(static_cast<int16_t>(3 * query.asymmetric_bias));
  for (int block = 0; block < 2; ++block) {
    for (int r = 0; r < kGroup; ++r) {
      __m512i even[2];
      __m512i odd[2];
      for (int p = 0; p < 2; ++p) {
        LookUp(query.asymmetric[r], tiled + (p * 2 + block) * 16 * 64, even[p], odd[p]);
      }
      // Plane 1 counts twice; all stays within 16 bits.
      const __m512i e = _mm512_add_epi16(even[0], _mm512_slli_epi16(even[1], 1));
      const __m512i o = _mm512_add_epi16(odd[0], _mm512_slli_epi16(odd[1], 1));
      __m512i parts[2];
      Interleave(_mm512_sub_epi16(e, bias), _mm512_sub_epi16(o, bias), parts[0], parts[1]);
      int32_t* out = sums + r * 128 + block * 64;
      for (int i = 0; i < 2; ++i) {
        _mm512_storeu_si512(out + 32 * i, _mm512_cvtepi16_epi32(_mm512_castsi512_si256(parts[i])));
        _mm512_storeu_si512(out + 32 * i + 16,
                            _mm512_cvtepi16_epi32(_mm512_extracti64x4_epi64(parts[i], 1)));
      }
    }
  }
}

}  // namespace spillway::bench
