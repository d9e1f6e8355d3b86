#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "host/base/limits.h"
#include "host/cpu/key_index.h"
#include "host/model/model_spec.h"

namespace spillway {

// Writes four bits of each of the elements x[channels[i]] at a token's place,
// slot in [0, 128), of int4 keys or of labels (KeySections). Thread-safe.
void StoreInt4(const float* x, std::span<const uint16_t> channels, int slot, std::byte* section);

// The same of a page's new keys. Thread-safe.
void StoreInt4Keys(const ModelSpec& spec, const PageKeys& keys, std::span<const uint16_t> channels,
                   std::byte* section);

// Queries made ready for estimates from 4-bit elements; see Int4Range.
struct Int4Query {
  int head_count = 0;
  int channel_count = 0;      // a multiple of 8
  const float* q = nullptr;   // [head][channel], times the softmax scale
  float sum[kGroupMax] = {};  // of q, in order
};

// Estimated logits of the 128 keys of a page, in nats: [G][128]. section: the
// int4 keys or the labels of KeySections. Picks the best instruction set of the
// machine.
void Int4Logits(const Int4Query& query, const std::byte* section, float* logits);

}  // namespace spillway
