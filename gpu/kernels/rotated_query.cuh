#pragma once

// The rotation of a query.
namespace spillway::cuda {

// Element j of P x, from P^T [d][d] and x [d] in shared memory. One chain of fused multiply-adds
// over i; the matrix column is loaded kAhead elements ahead.
__device__ inline float RotatedCoordinate(const float* transposed, const float* x, int d, int j) {
  constexpr int kAhead = 32;
  float y = 0;
  float column[2][kAhead];
#pragma unroll
  for (int i = 0; i < kAhead; ++i) {
    column[0][i] = i < d ? __ldg(transposed + i * d + j) : 0.0f;
  }
  for (int base = 0; base < d; base += 2 * kAhead) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int at = base + half * kAhead;
      if (at >= d) break;
      if (at + kAhead < d) {
#pragma unroll
        for (int i = 0; i < kAhead; ++i) {
          const int row = at + kAhead + i;
          column[1 - half][i] = row < d ? __ldg(transposed + row * d + j) : 0.0f;
        }
      }
#pragma unroll
      for (int i = 0; i < kAhead; ++i) {
        if (at + i < d) y = fmaf(column[half][i], x[at + i], y);
      }
    }
  }
  return y;
}

}  // namespace spillway::cuda
