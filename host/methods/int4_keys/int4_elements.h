#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "host/base/limits.h"
#include "host/cpu/key_index.h"
#include "host/model/model_spec.h"

namespace spillway {

// Quantises the elements x[channels[i]] of one key to four bits and writes them for the token in
// `slot`, in [0, 128). section: the int4 keys or the labels of KeySections. Thread-safe.
void StoreInt4(const float* x, std::span<const uint16_t> channels, int slot, std::byte* section);

// The same for the new keys of a page. Thread-safe.
void StoreInt4Keys(const ModelSpec& spec, const PageKeys& keys, std::span<const uint16_t> channels,
                   std::byte* section);

// Queries prepared for estimates from 4-bit elements; see Int4Range::Dot().
struct Int4Query {
  int head_count = 0;
  int channel_count = 0;      // a multiple of 8
  const float* q = nullptr;   // [head][channel], times the softmax scale
  float sum[kGroupMax] = {};  // per head: sum of q over the channels, in order
};

// Estimates the logits of the 128 keys of a page, in nats: [G][128]. section: the int4 keys or the
// labels of KeySections. Uses the best instruction set of the machine.
void Int4Logits(const Int4Query& query, const std::byte* section, float* logits);

}  // namespace spillway
