#pragma once

#include <cstdint>

#include "host/base/dtype.h"

// Checks whether a caller's tensors are finite.
namespace spillway::cuda {

// Number of elements in 16 bytes.
__device__ inline int ElementsOf16(DType dtype) { return dtype == DType::kF32 ? 4 : 8; }

// Index of the first element in 16 bytes that is not finite; -1 if all are finite.
__device__ inline int FirstBad(DType dtype, const uint4& bytes) {
  const uint32_t words[4] = {bytes.x, bytes.y, bytes.z, bytes.w};
  for (int i = 0; i < 4; ++i) {
    if (dtype == DType::kF32) {
      if ((words[i] & 0x7F800000u) == 0x7F800000u) return i;
      continue;
    }
    const uint32_t exponent = dtype == DType::kF16 ? 0x7C00u : 0x7F80u;
    if ((words[i] & exponent) == exponent) return 2 * i;
    if ((words[i] >> 16 & exponent) == exponent) return 2 * i + 1;
  }
  return -1;
}

}  // namespace spillway::cuda
