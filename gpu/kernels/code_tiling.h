#pragma once

#include <cstdint>

#include "host/base/host_device.h"
#include "host/base/limits.h"
#include "host/model/model_spec.h"

namespace spillway::cuda {

// How the CUDA device tiles codes. A code page holds the codes of
// kPageTokenCount tokens of one KV head:
//   planes   uint32 [plane][tile = 4][fragment][row = 8][word][octet = 4]
// and only with a rotation, see host/core/page_index.h:
//   factors  bf16 [tile = 4][row = 8][octet = 4]
//   norms    uint8 [tile = 4][row = 8][octet = 4]
//   centre   bf16 [d]
// and, only with value codes (see host/core/value_code.h):
//   value codes    uint32 [tile = 4][row = 8][part][word]
//   value factors  bf16 [tile = 4][row = 8][octet = 4]
//   value centre   bf16 [d]
// (tile, row, octet) is token 32 tile + 8 octet + row; plane 0 has the lowest bit of the codes. A
// fragment is up to four 32-bit words of a plane (the last may have fewer), what one binary
// tensor-core instruction multiplies. So one 16-byte load gives a lane a word of its key in each of
// four octets, ready for the instruction, and a page has no padding beyond a plane's last word.
// Codes of values are tiled for sums over tokens: byte b of a word belongs to the row's token of
// octet b. Codes of 3 bits have two parts, of the two low bits and of the top bit, others have one.
// A part of `width` bits has d * width / 8 words; dimension p * words + j is field p of each byte
// of word j.
inline constexpr int kCodeTileTokens = 32;
inline constexpr int kCodeTilesPerPage = kPageTokenCount / kCodeTileTokens;
inline constexpr int kFragmentWords = 4;

struct CodeTiling {
  int planes = 0;
  int words = 0;        // 32-bit words of one token's plane
  int centre_dims = 0;  // d with a rotation, else 0
  int value_bits = 0;   // 0: no value codes

  bool operator==(const CodeTiling&) const = default;
  static CodeTiling Of(const ModelSpec& spec) {
    return {spec.plane_count(), spec.plane_words(),
            spec.hash.kind == HashKind::kRotation ? spec.head_dim : 0, spec.value_bits()};
  }

  SPILLWAY_HOST_DEVICE int fragments() const {
    return (words + kFragmentWords - 1) / kFragmentWords;
  }
  SPILLWAY_HOST_DEVICE int fragment_words(int fragment) const {
    const int left = words - fragment * kFragmentWords;
    return left < kFragmentWords ? left : kFragmentWords;
  }
  // Offset of row 0, word 0, octet 0 of a fragment from the page's start, in words.
  SPILLWAY_HOST_DEVICE int fragment_offset(int plane, int tile, int fragment) const {
    return (plane * kCodeTilesPerPage + tile) * words * kCodeTileTokens +
           fragment * kFragmentWords * kCodeTileTokens;
  }
  // The same for one word of one token's plane; slot in [0, 128), word in [0, words).
  SPILLWAY_HOST_DEVICE int word_offset(int plane, int slot, int word) const {
    const int fragment = word / kFragmentWords;
    const int row = slot % 8;
    const int octet = slot % kCodeTileTokens / 8;
    return fragment_offset(plane, slot / kCodeTileTokens, fragment) +
           (row * fragment_words(fragment) + word % kFragmentWords) * 4 + octet;
  }
  // Index of a token's factor among the page's factors, and of its norm among the norms.
  SPILLWAY_HOST_DEVICE static int factor_index(int slot) {
    return slot / kCodeTileTokens * kCodeTileTokens + slot % 8 * 4 + slot % kCodeTileTokens / 8;
  }
  SPILLWAY_HOST_DEVICE int factor_offset_bytes() const {
    return planes * words * kPageTokenCount * 4;
  }
  SPILLWAY_HOST_DEVICE int norm_offset_bytes() const {
    return factor_offset_bytes() + kPageTokenCount * 2;
  }
  SPILLWAY_HOST_DEVICE int centre_offset_bytes() const {
    return norm_offset_bytes() + kPageTokenCount;
  }
  // Of the value codes' parts.
  SPILLWAY_HOST_DEVICE int value_parts() const { return value_bits == 3 ? 2 : 1; }
  SPILLWAY_HOST_DEVICE int value_width(int part) const {
    return value_bits == 1 || part == 1 ? 1 : 2;
  }
  SPILLWAY_HOST_DEVICE int value_words(int part) const {
    return centre_dims * value_width(part) / 8;
  }
  // 32-bit words of the value codes of a tile's row. Where part 1 begins, if there is one.
  SPILLWAY_HOST_DEVICE int value_row_words() const {
    return value_words(0) + (value_parts() == 2 ? value_words(1) : 0);
  }
  SPILLWAY_HOST_DEVICE int value_code_offset_bytes() const {
    return centre_offset_bytes() + centre_dims * 2;
  }
  SPILLWAY_HOST_DEVICE int value_factor_offset_bytes() const {
    return value_code_offset_bytes() + value_row_words() * kPageTokenCount;
  }
  SPILLWAY_HOST_DEVICE int value_centre_offset_bytes() const {
    return value_factor_offset_bytes() + kPageTokenCount * 2;
  }
  // A multiple of 16.
  SPILLWAY_HOST_DEVICE int page_bytes() const {
    if (centre_dims == 0) return factor_offset_bytes();
    return value_bits > 0 ? value_centre_offset_bytes() + centre_dims * 2
                          : value_code_offset_bytes();
  }
};

}  // namespace spillway::cuda
