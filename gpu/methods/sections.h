#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "gpu/kernels/encode.h"
#include "host/methods/weights/key_sections.h"

namespace spillway::cuda {

// What the sections behind the codes of index pages need; see KeySections.
// Pointers are device addresses.
struct SectionWeights {
  KeySections sections;
  int64_t offset = 0;  // bytes to the sections in an index page
  int lsh_bits = 0;
  const uint16_t* channels = nullptr;  // [H][label_channels]
  const float* projections = nullptr;  // [d][tables * lsh_bits]

  bool operator==(const SectionWeights&) const = default;
};

// Fills the sections of tokens [work.begin, work.end), bit-equal to those of the CPU device. Does
// not wait. REQUIRES: work.centre is set.
cudaError_t LaunchEncodeSections(const EncodeWork& work, const SectionWeights& weights,
                                 cudaStream_t stream);

}  // namespace spillway::cuda
