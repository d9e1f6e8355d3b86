#pragma once

#include <cstdint>

#include "host/memory/layer_rows.h"
#include "host/model/model_spec.h"

namespace spillway {

// How the CPU device tiles codes. A code page holds the codes of
// kPageTokenCount tokens of one KV head, transposed so that a vector register
// holds one 32-bit word of 16 neighbouring tokens:
//   planes   uint32 [plane][tile = 8][word][lane = 16], plane 0 the low bit
//   factors  bf16 [128], only with a rotation
// Bit j of word w is dimension 32 w + j, the image that DESIGN fixes.
inline constexpr int kTileTokenCount = 16;
inline constexpr int kTilesPerPage = kPageTokenCount / kTileTokenCount;

struct CodeLayout {
  int planes = 0;
  int words = 0;
  bool factors = false;

  static CodeLayout Of(const ModelSpec& spec) {
    return {spec.plane_count(), spec.plane_words(), spec.hash.kind == HashKind::kRotation};
  }
  int64_t plane_stride_words() const { return int64_t{kTilesPerPage} * words * kTileTokenCount; }
  int64_t factor_offset_bytes() const { return planes * plane_stride_words() * 4; }
  int64_t page_bytes() const {
    return factor_offset_bytes() + (factors ? int64_t{kPageTokenCount} * 2 : 0);
  }
};

}  // namespace spillway
