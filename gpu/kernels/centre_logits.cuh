#pragma once

#include "gpu/kernels/device_math.cuh"
#include "host/core/page_score.h"
#include "host/core/rank_error.h"

// What pages' centres add to their keys' estimated logits; see
// host/core/page_score.h. Half a warp takes a page's centre, a lane a chain.
namespace spillway::cuda {

inline constexpr int kHalfWarp = kRankChains;
static_assert(kHalfWarp == 16);

// The lane's coordinates of a page's centre: chain lane % 16.
class CentreChain {
 public:
  __device__ CentreChain(const CodeTiling& tiling, const std::byte* page, int lane)
      : dims_(tiling.centre_dims) {
    const auto* centre =
        reinterpret_cast<const uint16_t*>(page + tiling.centre_offset_bytes()) + lane % kHalfWarp;
#pragma unroll
    for (int i = 0; i < kCoordinates; ++i) {
      c_[i] = i * kHalfWarp < dims_ ? BFloat16ToFloat(centre[i * kHalfWarp]) : 0.0f;
    }
  }
  // CentreLogit() of a query head, q [d], in every lane of the half. All lanes of
  // the warp; the halves may have heads of their own.
  __device__ float Logit(const float* q, float softmax_scale, int lane) const {
    float sum = 0;
#pragma unroll
    for (int i = 0; i < kCoordinates; ++i) {
      if (i * kHalfWarp < dims_) sum = fmaf(q[i * kHalfWarp + lane % kHalfWarp], c_[i], sum);
    }
#pragma unroll
    for (int apart = kHalfWarp / 2; apart > 0; apart /= 2) {
      sum += __shfl_xor_sync(kFullWarp, sum, apart);
    }
    return CentreLogit(sum, softmax_scale);
  }

 private:
  static constexpr int kCoordinates = kHeadDimMax / kHalfWarp;
  const int dims_;
  float c_[kCoordinates];
};

// CentreLogit() of a page for each query head of a quartet, head lane % 4 of it;
// of heads that are not there another's. All lanes of the warp.
__device__ inline float QuartetCentreLogit(const AttendShape& shape, const float* q,
                                           const CentreChain& chain, int quartet, int lane) {
  float own = 0;
#pragma unroll
  for (int pair = 0; pair < 2; ++pair) {
    const int head = min(quartet * 4 + pair * 2 + lane / kHalfWarp, shape.group - 1);
    const float logit = chain.Logit(q + head * shape.head_dim, shape.scale, lane);
    // Lane 16 i has that of head 2 pair + i.
    const float received = __shfl_sync(kFullWarp, logit, lane % 2 * kHalfWarp);
    if (lane % 4 / 2 == pair) own = received;
  }
  return own;
}

// Fills UnitRequest::centre_logits and raises UnitState::reference to their
// largest; warp `warp` of `warps`. All lanes.
__device__ inline void StoreCentreLogits(const AttendShape& shape, const UnitRequest& u,
                                         int64_t warp, int64_t warps) {
  const int lane = threadIdx.x % 32;
  const int half = lane / kHalfWarp;
  const int64_t last = u.scored_page_end() - 1;
  float largest = -INFINITY;  // of head lane % 16
  for (int64_t base = u.scored_page_begin() + 2 * warp; base <= last; base += 2 * warps) {
    const int64_t page = min(base + half, last);
    const CentreChain chain(shape.tiling, u.code_pages[page], lane);
    float own = 0;
    for (int head = 0; head < shape.group; ++head) {
      const float logit = chain.Logit(u.q + head * shape.head_dim, shape.scale, lane);
      if (lane % kHalfWarp == head) own = logit;
    }
    static_assert(kGroupMax <= kHalfWarp);
    if (lane % kHalfWarp < shape.group) {
      u.centre_logits[page * shape.group + lane % kHalfWarp] = own;
    }
    largest = fmaxf(largest, own);
  }
  largest = fmaxf(largest, __shfl_xor_sync(kFullWarp, largest, kHalfWarp));
  if (lane < shape.group && largest > -INFINITY) {
    atomicMax(&u.state->reference[lane], OrderedBits(largest));
  }
}

}  // namespace spillway::cuda
