#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "host/base/limits.h"

namespace spillway {

// Writes four bits of each of the elements x[channels[i]] at a token's place,
// slot in [0, 128), of a sketch or of labels (KeySections). Thread-safe.
void StoreSketch(const float* x, std::span<const uint16_t> channels, int slot, std::byte* section);

// Queries made ready for estimates from 4-bit elements; see SketchRange.
struct SketchQuery {
  int head_count = 0;
  int channel_count = 0;      // a multiple of 8
  const float* q = nullptr;   // [head][channel], times the softmax scale
  float sum[kGroupMax] = {};  // of q, in order
};

// Estimated logits of the 128 keys of a page, in nats: [G][128]. section: the
// sketch or the labels of KeySections. Picks the best instruction set of the
// machine.
void SketchLogits(const SketchQuery& query, const std::byte* section, float* logits);

}  // namespace spillway
