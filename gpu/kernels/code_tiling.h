#pragma once

#include <cstdint>

#include "host/base/limits.h"
#include "host/core/host_device.h"
#include "host/model/model_spec.h"

namespace spillway::cuda {

// How the CUDA device tiles codes. A code page holds the codes of
// kPageTokenCount tokens of one KV head:
//   planes   uint32 [plane][tile = 4][fragment][row = 8][word][octet = 4]
// and only with a rotation, see host/core/page_index.h:
//   factors  bf16 [tile = 4][row = 8][octet = 4]
//   norms    uint8 [tile = 4][row = 8][octet = 4]
//   centre   bf16 [d]
// (tile, row, octet) is token 32 tile + 8 octet + row; plane 0 has the lowest bit of the codes. A
// fragment is up to four 32-bit words of a plane (the last may have fewer), what one binary
// tensor-core instruction multiplies. So one 16-byte load gives a lane a word of its key in each of
// four octets, ready for the instruction, and a page has no padding beyond a plane's last word.
inline constexpr int kCodeTileTokens = 32;
inline constexpr int kCodeTilesPerPage = kPageTokenCount / kCodeTileTokens;
inline constexpr int kFragmentWords = 4;

struct CodeTiling {
  int planes = 0;
  int words = 0;        // 32-bit words of one token's plane
  int centre_dims = 0;  // d with a rotation, else 0

  bool operator==(const CodeTiling&) const = default;
  static CodeTiling Of(const ModelSpec& spec) {
    return {spec.plane_count(), spec.plane_words(),
            spec.hash.kind == HashKind::kRotation ? spec.head_dim : 0};
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
  // A multiple of 16.
  SPILLWAY_HOST_DEVICE int page_bytes() const {
    return centre_dims > 0 ? centre_offset_bytes() + centre_dims * 2 : factor_offset_bytes();
  }
};

}  // namespace spillway::cuda
