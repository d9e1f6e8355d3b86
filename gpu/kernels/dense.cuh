#pragma once

#include "gpu/kernels/fold.cuh"
#include "gpu/kernels/step.cuh"

// Exact attention over all rows.
namespace spillway::cuda {

// Folds the splits of dense units. Grid (blocks, units).
__global__ void DenseFoldKernel(DenseWave wave) {
  extern __shared__ __align__(16) float memory[];
  __shared__ SoftmaxSums sums[kDenseQueryRows];
  __shared__ bool stop;
  const DenseUnit& u = wave.units[blockIdx.y];
  const int d = wave.head_dim;
  const int64_t limit = min(u.n, wave.limit);
  const int64_t first_split = wave.first / u.split_rows;
  const int64_t split_end = (limit + u.split_rows - 1) / u.split_rows;
  if (first_split + blockIdx.x >= split_end) return;
  float* queries = memory;
  float* rest = queries + kDenseQueryRows * d;
  for (int i = threadIdx.x; i < u.query_rows * d; i += blockDim.x) {
    const float q = u.q != nullptr ? u.q[i] : TensorQuery(wave.step, u.place, wave.group, d, i);
    queries[i] = q * wave.scale;
  }
  const FoldShape fold = {wave.dtype, d, u.query_rows};
  for (int64_t s = first_split + blockIdx.x; s < split_end; s += gridDim.x) {
    if (threadIdx.x == 0) stop = *static_cast<const volatile int32_t*>(wave.cancel) != 0;
    if (threadIdx.x < kDenseQueryRows) sums[threadIdx.x] = SoftmaxSums::Empty();
    __syncthreads();
    if (stop) return;
    const int64_t first = s * u.split_rows;
    ValueSums<kDenseQueryRows, false> values;
    FoldRows<kDenseQueryRows, false, 4>(
        fold, min(u.split_rows, limit - first),
        [&](int64_t j) { return RowAddress(u.row_pages, wave.row_bytes, first - wave.first + j); },
        [&](int r, int64_t j) { return first + j < u.visible[r]; },
        [&](int64_t j) { atomicMin(u.error_token, static_cast<uint32_t>(first + j)); },
        [](int, int64_t, const float*, float l) { return l; }, queries, rest, sums, values);
    __syncthreads();
    float* out = u.partials + s * u.query_rows * (2 + d);
    if (threadIdx.x < u.query_rows) {
      out[2 * threadIdx.x] = sums[threadIdx.x].max;
      out[2 * threadIdx.x + 1] = sums[threadIdx.x].sum;
    }
    if (threadIdx.x < d) {
#pragma unroll
      for (int r = 0; r < kDenseQueryRows; ++r) {
        if (r >= u.query_rows) break;
        out[2 * u.query_rows + r * d + threadIdx.x] = values.value[r];
      }
    }
    __syncthreads();
  }
}

// Merges a dense unit's splits, in order. Grid (query rows, units).
__global__ void DenseFinishKernel(DenseWave wave) {
  const DenseUnit& u = wave.units[blockIdx.y];
  const int r = blockIdx.x;
  const int d = wave.head_dim;
  if (r == 0 && threadIdx.x == 0) u.result->error_token = *u.error_token;
  if (r >= u.query_rows) return;
  const int64_t stride = u.query_rows * (2 + d);
  float max = -INFINITY;
  for (int64_t s = 0; s < u.split_count; ++s) max = fmaxf(max, u.partials[s * stride + 2 * r]);
  double sum = 0;
  for (int64_t s = 0; s < u.split_count; ++s) {
    const float* part = u.partials + s * stride;
    sum += double{SoftmaxFactor(part[2 * r], max)} * part[2 * r + 1];
  }
  const auto element = [&](int i) {
    double value = 0;
    for (int64_t s = 0; s < u.split_count; ++s) {
      const float* part = u.partials + s * stride;
      value += double{SoftmaxFactor(part[2 * r], max)} * part[2 * u.query_rows + r * d + i];
    }
    return static_cast<float>(value / sum);
  };
  const auto lse = static_cast<float>(max + log(sum));
  if (wave.step.check.header != nullptr) {
    return WriteToTensors(wave.step, u.place, wave.group, d, r, *u.error_token == kNoToken, element,
                          lse, u.result->report);
  }
  for (int i = threadIdx.x; i < d; i += blockDim.x) u.out[r * d + i] = element(i);
  if (threadIdx.x == 0) u.lse[r] = lse;
}

}  // namespace spillway::cuda
