#pragma once

#include <cstddef>
#include <cstdint>

// Other ways to score the codes of a page of 128 keys, measured beside the
// kernels that the device uses. Each gives the integers of those kernels:
//   asymmetric  sums [row][128] of weight x code, codes of 2 bits, which
//               FinishLogits turns into estimated logits as the device does
//   hamming     matching bits [128], summed over the group
// They need AVX-512 (F, BW, VL, VPOPCNTDQ) and 128 dimensions.
namespace spillway::bench {

inline constexpr int kDims = 128;
inline constexpr int kGroup = 4;

bool AlternativesSupported();

// Queries made ready for the alternatives.
struct PopcountQuery {
  uint32_t signs[kGroup][4];      // hamming: sign bits of the query, per word
  uint32_t planes[kGroup][4][4];  // asymmetric: bit planes of (weight + 15) / 2, [row][plane][word]
};
struct NibbleQuery {
  // Tables of 16 biased sums for the low and high half of each byte of
  // dimensions; sums are what they hold less `bias`.
  alignas(64) uint8_t hamming[16][2][16];
  int32_t hamming_bias;
  alignas(64) uint8_t asymmetric[kGroup][16][2][16];
  int32_t asymmetric_bias;  // of one plane
};

// signs: [row][128], 0 or 1. weights: [row][128], odd, in [-15, 15].
PopcountQuery MakePopcountQuery(const uint8_t* signs, const int8_t* weights);
NibbleQuery MakeNibbleQuery(const uint8_t* signs, const int8_t* weights);

// Codes of a page, [128 keys][128 dimensions] of 0 .. 2^planes - 1, in the
// tilings that the kernels read: uint32 [plane][16 keys = 8][word = 4][key = 16]
// and bytes [plane][64 keys = 2][byte of dimensions = 16][key = 64].
inline constexpr int kPlaneBytes = 2048;
void TileForPopcount(const uint8_t* codes, int planes, uint32_t* tiled);
void TileForNibbles(const uint8_t* codes, int planes, uint8_t* tiled);

void HammingPopcount(const PopcountQuery& query, const uint32_t* tiled, uint16_t* matches);
void AsymmetricPopcount(const PopcountQuery& query, const uint32_t* tiled, int32_t* sums);
void HammingNibbles(const NibbleQuery& query, const uint8_t* tiled, uint16_t* matches);
void AsymmetricNibbles(const NibbleQuery& query, const uint8_t* tiled, int32_t* sums);

// logits [row][128] = coefficient * (2 sum) * factor; factors: bf16 [128].
void FinishLogits(const int32_t* sums, float coefficient, const uint16_t* factors, float* logits);

}  // namespace spillway::bench
