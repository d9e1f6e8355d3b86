#pragma once

#include <cstdint>

namespace spillway::cuda {

// A thread's columns of a row-major matrix [rows][width], read kAhead rows
// ahead of their use: a small block has little else to hide the memory's
// latency. The first rows are asked for at once.
template <int kColumns, int kAhead>
class MatrixColumns {
 public:
  // Columns first, first + step, ...; those beyond the matrix are its last.
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

  // Adds the products with vectors x [kVectors][stride] in shared memory,
  // aligned to 16 bytes: each sum[c][v] is continued as one chain of fused
  // multiply-adds over the rows. To be called once.
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
    // next_ is at the rows that make no four.
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

  // The next four rows to ahead_[at].
  __device__ void Read(int at) {
#pragma unroll
    for (int i = 0; i < kQuad; ++i) {
#pragma unroll
      for (int c = 0; c < kColumns; ++c) ahead_[at + i][c] = next_[offset_[c]];
      next_ += width_;
    }
  }

  const float* next_;  // the first column's, of the row to read next
  int offset_[kColumns];
  int rows_;
  int width_;
  float ahead_[kAhead][kColumns];
};

}  // namespace spillway::cuda
