#pragma once

#include <cstdint>

#include "gpu/kernels/attend.h"
#include "host/methods/weights/key_sections.h"

// What the methods ask beside the core's AttendShape and UnitRequest.
namespace spillway::cuda {

// Of a model: read by launchers, which pass to kernels what they need.
struct MethodShape {
  int plane_bits = 0;      // bits of a key that hamming compares
  int heads_per_code = 0;  // query heads that it compares each of them with
  bool mlp = false;        // whether codes are an MLP's
  KeySections sections;    // behind the codes of index pages
  int64_t section_offset = 0;
  int lsh_bits = 0;
};

// What a first selection finds out: the bin from which on tokens are
// candidates, and how many of that bin's are not.
struct FirstSelectionState {
  int32_t bin;
  int64_t skip;
};

// Of a unit; in device memory before the wave's first kernel begins. Pointers
// are device addresses, those of methods that the wave does not use null.
struct MethodRequest {
  const uint32_t* query_codes;  // [heads_per_code][words], with an MLP
  const uint16_t* channels;     // [label_channels], of the KV head
  // LSH sampling.
  const float* projections;  // [d][tables * lsh_bits]
  const float* centre;       // [d]
  uint16_t* query_buckets;   // [G][tables]
  uint16_t* takers;          // [n] a bit a query head
  // A first selection.
  int64_t candidate_count;
  uint32_t* candidate_mask;  // [segments * kSegmentTokens / 32]
  FirstSelectionState* first_selection;
};

}  // namespace spillway::cuda
