#pragma once

#include <cstdint>

#include "host/base/limits.h"
#include "host/core/host_device.h"
#include "host/model/model_spec.h"

namespace spillway::cuda {

// How the CUDA device tiles codes. A code page holds the codes of
// kPageTokenCount tokens of one KV head:
//   planes   uint32 [plane][group = 4][chunk][row = 8][word][tile = 4]
//   factors  bf16 [group = 4][row = 8][tile = 4], only with a rotation
// Token 32 group + 8 tile + row; plane 0 is a code's low bit. A chunk is up to
// four 32-bit words of a plane (the last may have fewer): what one binary
// tensor-core instruction multiplies. So a lane reads the words of its key of
// four tiles as one 16-byte load, ready for the instruction, and a page has no
// padding beyond a plane's last word.
inline constexpr int kGroupTokenCount = 32;
inline constexpr int kGroupsPerPage = kPageTokenCount / kGroupTokenCount;
inline constexpr int kChunkWords = 4;

struct CodeTiling {
  int planes = 0;
  int words = 0;  // of a plane of one token
  bool factors = false;

  bool operator==(const CodeTiling&) const = default;
  static CodeTiling Of(const ModelSpec& spec) {
    return {spec.plane_count(), spec.plane_words(), spec.hash.kind == HashKind::kRotation};
  }

  SPILLWAY_HOST_DEVICE int chunks() const { return (words + kChunkWords - 1) / kChunkWords; }
  SPILLWAY_HOST_DEVICE int chunk_words(int chunk) const {
    const int left = words - chunk * kChunkWords;
    return left < kChunkWords ? left : kChunkWords;
  }
  // In words from the page's start to row 0, word 0, tile 0 of a chunk.
  SPILLWAY_HOST_DEVICE int chunk_offset(int plane, int group, int chunk) const {
    return (plane * kGroupsPerPage + group) * words * kGroupTokenCount +
           chunk * kChunkWords * kGroupTokenCount;
  }
  // Of one word of one token's plane; slot in [0, 128), word in [0, words).
  SPILLWAY_HOST_DEVICE int word_offset(int plane, int slot, int word) const {
    const int chunk = word / kChunkWords;
    const int row = slot % 8;
    const int tile = slot % kGroupTokenCount / 8;
    return chunk_offset(plane, slot / kGroupTokenCount, chunk) +
           (row * chunk_words(chunk) + word % kChunkWords) * 4 + tile;
  }
  // Of a token's factor among the page's.
  SPILLWAY_HOST_DEVICE static int factor_index(int slot) {
    return slot / kGroupTokenCount * kGroupTokenCount + slot % 8 * 4 + slot % kGroupTokenCount / 8;
  }
  SPILLWAY_HOST_DEVICE int factor_offset_bytes() const {
    return planes * words * kPageTokenCount * 4;
  }
  SPILLWAY_HOST_DEVICE int page_bytes() const {
    return factor_offset_bytes() + (factors ? kPageTokenCount * 2 : 0);
  }
};

}  // namespace spillway::cuda
