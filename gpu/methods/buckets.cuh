#pragma once

#include <cstdint>

// LSH buckets.
namespace spillway::cuda {

// The name of x's bucket in hash table `table`: the signs of its projections, each one chain of
// fused multiply-adds over the elements. projections: [dim][width].
__device__ inline uint16_t BucketName(const float* projections, int width, int bits, int table,
                                      const float* x, int dim) {
  uint32_t name = 0;
  for (int b = 0; b < bits; ++b) {
    const float* column = projections + table * bits + b;
    float y = 0;
    for (int i = 0; i < dim; ++i) y = fmaf(x[i], __ldg(column + int64_t{i} * width), y);
    name |= static_cast<uint32_t>(y > 0) << b;
  }
  return static_cast<uint16_t>(name);
}

}  // namespace spillway::cuda
