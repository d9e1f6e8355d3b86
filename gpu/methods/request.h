#pragma once

#include <cstdint>

#include "gpu/kernels/attend.h"
#include "host/methods/weights/key_sections.h"

// What the optional methods need besides the core's AttendShape and UnitRequest.
namespace spillway::cuda {

// Of a model. Launchers read it, and pass to kernels what they need.
struct MethodShape {
  int plane_bits = 0;      // bits of a key that hamming compares
  int heads_per_code = 0;  // query heads that each of them is compared with
  bool mlp = false;        // whether an MLP computes the codes
  KeySections sections;    // behind the codes of index pages
  int64_t section_offset = 0;
  int lsh_bits = 0;
};

// The threshold of a first selection: all tokens of higher bins are candidates, and all of this bin
// but the first `skip`.
struct FirstSelectionState {
  int32_t bin;
  int64_t skip;
};

// Of a unit; it is in device memory before the wave's first kernel begins. Pointers are device
// addresses; those of methods that the wave does not use are null.
struct MethodRequest {
  const uint32_t* query_codes;  // [heads_per_code][words], with an MLP
  const uint16_t* channels;     // [label_channels], of the KV head
  // LSH sampling.
  const float* projections;  // [d][tables * lsh_bits]
  const float* centre;       // [d]
  uint16_t* query_buckets;   // [G][tables]
  uint16_t* takers;          // [n], one bit per query head
  // A first selection.
  int64_t candidate_count;
  uint32_t* candidate_mask;  // [segments * kSegmentTokens / 32]
  FirstSelectionState* first_selection;
};

}  // namespace spillway::cuda
