#pragma once

#include <cstdint>

#include "host/memory/layer_rows.h"
#include "host/model/model_spec.h"

namespace spillway {

// How the CPU device tiles codes. A code page holds the codes of kPageTokenCount tokens of one KV
// head, transposed so that a vector register holds one 32-bit word of 16 neighbouring tokens:
//   parts    uint32 [tile = 8][part][word][lane = 16]
// and, only with a rotation (see host/core/page_index.h):
//   factors  bf16 [128]
//   norms    uint8 [128]
//   centre   bf16 [d]
// and, only with value codes (see host/core/value_code.h):
//   value codes    uint32 [group = 32][part][word]
//   value factors  bf16 [128]
//   value centre   bf16 [d]
// A code of B bits per dimension is split into parts of 1, 2 or 4 bits (B = 3: the two low bits,
// then the top bit), because a field of such a width can be masked out of its word and multiplied
// in place. A word has 32 / width dimensions: dimension 4 i + b of the word is field i of byte b.
// Codes of values are tiled for sums over tokens: a group is four neighbouring tokens, and byte b
// of a word belongs to its token b. B bits are split into parts of 2 and 1 bits (B = 3: the two low
// bits, then the top bit). A part of this width has d * width / 8 words; dimension p * words + j is
// field p of each byte of word j.
inline constexpr int kTileTokenCount = 16;
inline constexpr int kTilesPerPage = kPageTokenCount / kTileTokenCount;
inline constexpr int kValueGroupTokens = 4;
inline constexpr int kValueGroupsPerPage = kPageTokenCount / kValueGroupTokens;

struct CodeLayout {
  int parts = 0;
  int width[2] = {0, 0};  // bits of a field, per part
  int dims = 0;           // dimensions, padded to 32
  int centre_dims = 0;    // d with a rotation, else 0
  int value_bits = 0;     // 0: no value codes

  static CodeLayout Of(const ModelSpec& spec) {
    CodeLayout layout;
    const int bits = spec.plane_count();
    layout.parts = bits == 0 ? 0 : bits == 3 ? 2 : 1;
    layout.width[0] = bits == 3 ? 2 : bits;
    layout.width[1] = bits == 3 ? 1 : 0;
    layout.dims = spec.plane_words() * 32;
    layout.centre_dims = spec.hash.kind == HashKind::kRotation ? spec.head_dim : 0;
    layout.value_bits = spec.value_bits();
    return layout;
  }

  int words(int part) const { return dims * width[part] / 32; }
  int word_dims(int part) const { return 32 / width[part]; }
  // 32-bit words of a tile over all lanes; and the offset, in words from the start of the page, of
  // word 0, lane 0 of a tile's part.
  int64_t tile_words() const { return int64_t{words(0) + words(1)} * kTileTokenCount; }
  int64_t tile_offset(int part, int tile) const {
    return tile * tile_words() + (part == 0 ? 0 : int64_t{words(0)} * kTileTokenCount);
  }
  // Bit position of dimension d within its word.
  int shift(int part, int d) const { return 8 * (d % 4) + width[part] * (d / 4); }
  int64_t factor_offset_bytes() const { return kTilesPerPage * tile_words() * 4; }
  int64_t norm_offset_bytes() const { return factor_offset_bytes() + 2 * kPageTokenCount; }
  int64_t centre_offset_bytes() const { return norm_offset_bytes() + kPageTokenCount; }
  // Value codes: bits of a field of a part, and how many parts there are.
  int value_width(int part) const { return value_bits == 1 || part == 1 ? 1 : 2; }
  int value_parts() const { return value_bits == 3 ? 2 : 1; }
  int value_words(int part) const { return centre_dims * value_width(part) / 8; }
  // 32-bit words of a group of tokens.
  int value_group_words() const {
    return value_words(0) + (value_parts() == 2 ? value_words(1) : 0);
  }
  int64_t value_code_offset_bytes() const { return centre_offset_bytes() + 2 * centre_dims; }
  int64_t value_factor_offset_bytes() const {
    return value_code_offset_bytes() + int64_t{4} * kValueGroupsPerPage * value_group_words();
  }
  int64_t value_centre_offset_bytes() const {
    return value_factor_offset_bytes() + 2 * kPageTokenCount;
  }
  int64_t page_bytes() const {
    if (centre_dims == 0) return factor_offset_bytes();
    return value_bits > 0 ? value_centre_offset_bytes() + 2 * centre_dims
                          : value_code_offset_bytes();
  }
};

}  // namespace spillway
