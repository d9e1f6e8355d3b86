#pragma once

#include "gpu/kernels/rotated_query.cuh"
#include "gpu/kernels/unit_start.cuh"
#include "host/core/query_code.h"
#include "host/core/rank_error.h"

// Converts query heads to the bit planes that tensor cores multiply with codes.
namespace spillway::cuda {

// Resets units and copies their queries; `oracle` needs no more. Grid (blocks, units).
__global__ void ClearUnitKernel(AttendShape shape, PinnedRequests requests) {
  __shared__ UnitRequest u;
  TriggerDependents();
  FetchRequest(requests, u);
  ClearUnit(shape, u);
  const int size = shape.group * shape.head_dim;
  for (int i = blockIdx.x * blockDim.x + threadIdx.x; i < size; i += gridDim.x * blockDim.x) {
    u.q[i] =
        QueryOf(requests, u.place, shape.group, shape.head_dim, i, PinnedQuery(requests, size, i));
  }
  EndFirst(requests, u);
}

// For `asymmetric`: the levels w of query_code.h of the rotated query heads, stored as bit planes
// of w + 8; row = plane * 4 + head of the quartet. Grid (heads, padded to quartets; units), one
// thread per dimension, padded to 32.
__global__ void PrepareAsymmetricKernel(AttendShape shape, PinnedRequests requests) {
  __shared__ UnitRequest u;
  __shared__ float x[kHeadDimMax];
  __shared__ float warp_largest[kHeadDimMax / 32];
  __shared__ int32_t warp_sums[kHeadDimMax / 32];
  // Sums of the runs of query_code.h.
  __shared__ float norm_runs[kHeadDimMax / kQueryRun];
  __shared__ float error_runs[kHeadDimMax / kQueryRun];
  static_assert(kQueryRun == 32);
  const int d = shape.head_dim;
  const int g = blockIdx.x;
  const int j = threadIdx.x;
  TriggerDependents();
  // Loaded at the same time as the request.
  float own = 0;
  if (g < shape.group && j < d) own = PinnedQuery(requests, shape.group * d, g * d + j);
  FetchRequest(requests, u);
  const int lane = j % 32;
  const int word = j / 32;
  const int words = shape.tiling.words;
  const bool present = g < shape.group && j < d;
  float y = 0;
  if (present) {
    own = QueryOf(requests, u.place, shape.group, d, g * d + j, own);
    x[j] = own;
    u.q[g * d + j] = own;
  }
  __syncthreads();
  if (present) y = RotatedCoordinate(u.rotation_transposed, x, d, j);
  ClearUnit(shape, u);
  float largest = WarpMax(fabsf(y));
  if (lane == 0) warp_largest[word] = largest;
  __syncthreads();
  for (int w = 0; w < words; ++w) largest = fmaxf(largest, warp_largest[w]);
  const float step = QueryStep(largest);
  int weight = 0;
  int code = 0;
  float error = 0;
  if (present && step > 0) {
    const int level = QueryLevel(y, step);
    code = level + 8;
    weight = QueryWeight(level);
    error = QueryErrorSquare(y, level, step);
  }
  for (int plane = 0; plane < 4; ++plane) {
    const uint32_t bits = __ballot_sync(kFullWarp, code >> plane & 1);
    if (lane == 0) u.query_planes[(g / 4 * 16 + plane * 4 + g % 4) * words + word] = bits;
  }
  const int sum = WarpSum(weight);
  const float norm_run = WarpSum(y * y);
  const float error_run = WarpSum(error);
  if (lane == 0) {
    warp_sums[word] = sum;
    norm_runs[word] = norm_run;
    error_runs[word] = error_run;
  }
  __syncthreads();
  EndFirst(requests, u);
  if (j != 0 || g >= shape.group) return;
  int total = 0;
  float norm_sq = 0;
  float error_sq = 0;
  for (int w = 0; w < words; ++w) {
    total += warp_sums[w];
    norm_sq += norm_runs[w];
    error_sq += error_runs[w];
  }
  UnitState& state = *u.state;
  state.offset[g] = QueryOffset(shape.bits_per_dim, total);
  state.coefficient[g] = QueryCoefficient(shape.scale, step, shape.quantiser_step);
  state.rank_error_scale[g] =
      RankErrorScale(shape.scale, shape.quantiser_distortion, norm_sq, error_sq);
}

}  // namespace spillway::cuda
