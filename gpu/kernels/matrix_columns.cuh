#pragma once

#include <cstdint>

namespace spillway::cuda {

// A thread's columns of a row-major matrix [rows][width], loaded kAhead rows before their use: a
// small block has little else to hide the latency of memory. The constructor starts the first
// loads.
template <int kColumns, int kAhead>
class MatrixColumns {
 public:
  // Columns first, first + step, ...; the last column takes the place of those beyond the matrix.
  __device__ MatrixColumns(const float* matrix, int rows, int width, int first, int step)
      : rows_(rows), width_(width) {
    next_ = matrix + min(first, width - 1);
#pragma unroll
    for (int c = 0; c < kColumns; ++c) {
      offset_[c] = min(first + c * step, width - 1) - min(first, width - 1);
    }
#pragma unroll
    for (int i = 0; i < kAhead; i += kQuad) {
      if (i + kQuad <= rows) Read(i);
    }
  }

  // Adds to sum[c][v] the product of column c with vector v of x [kVectors][stride], which is in
  // shared memory and aligned to 16 bytes. Each sum is one chain of fused multiply-adds over the
  // rows. Call this only once.
  template <int kVectors>
  __device__ void MultiplyAdd(const float* x, int stride, float (&sum)[kColumns][kVectors]) {
    static_assert(kAhead % kQuad == 0);
    int row = 0;
#pragma unroll 1
    while (row + kQuad <= rows_) {
#pragma unroll
      for (int i = 0; i < kAhead; i += kQuad) {
        if (row + kQuad > rows_) break;
#pragma unroll
        for (int v = 0; v < kVectors; ++v) {
          const float4 a = *reinterpret_cast<const float4*>(x + v * stride + row);
#pragma unroll
          for (int c = 0; c < kColumns; ++c) {
            sum[c][v] = fmaf(a.x, ahead_[i][c], sum[c][v]);
            sum[c][v] = fmaf(a.y, ahead_[i + 1][c], sum[c][v]);
            sum[c][v] = fmaf(a.z, ahead_[i + 2][c], sum[c][v]);
            sum[c][v] = fmaf(a.w, ahead_[i + 3][c], sum[c][v]);
          }
        }
        row += kQuad;
        if (row + kAhead <= rows_) Read(i);
      }
    }
    // The last rows, fewer than four: next_ points to the first of them.
#pragma unroll 1
    for (; row < rows_; ++row) {
#pragma unroll
      for (int c = 0; c < kColumns; ++c) {
        const float w = next_[offset_[c]];
#pragma unroll
        for (int v = 0; v < kVectors; ++v) sum[c][v] = fmaf(x[v * stride + row], w, sum[c][v]);
      }
      next_ += width_;
    }
  }

 private:
  static constexpr int kQuad = 4;

  // Loads the next four rows into ahead_[at], ahead_[at + 1], ...
  __device__ void Read(int at) {
#pragma unroll
    for (int i = 0; i < kQuad; ++i) {
#pragma unroll
      for (int c = 0; c < kColumns; ++c) ahead_[at + i][c] = next_[offset_[c]];
      next_ += width_;
    }
  }

  const float* next_;  // first column of the row to read next
  int offset_[kColumns];
  int rows_;
  int width_;
  float ahead_[kAhead][kColumns];
};

}  // namespace spillway::cuda
