#pragma once

#include "gpu/kernels/device_math.cuh"
#include "host/core/page_score.h"
#include "host/core/rank_error.h"

// Centre logits: what the centre of a page adds to the estimated logits of its keys
// (host/core/page_score.h). Half a warp multiplies one centre, one lane per chain.
namespace spillway::cuda {

inline constexpr int kHalfWarp = kRankChains;
static_assert(kHalfWarp == 16);

// A lane's coordinates of a vector: lane % 16, lane % 16 + 16, ... (chain lane % 16); 0 beyond the
// last. kFragments: CodeTiling::fragments(), of 128 dimensions each.
template <int kFragments>
struct ChainCoordinates {
  static constexpr int kCount = kFragments * kFragmentWords * 32 / kHalfWarp;
  float x[kCount];

  __device__ void LoadCentre(const CodeTiling& tiling, const std::byte* page, int lane) {
    const auto* centre =
        reinterpret_cast<const uint16_t*>(page + tiling.centre_offset_bytes()) + lane % kHalfWarp;
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      x[i] = i * kHalfWarp < tiling.centre_dims ? BFloat16ToFloat(centre[i * kHalfWarp]) : 0.0f;
    }
  }
  __device__ void LoadQuery(const AttendShape& shape, const float* q, int head, int lane) {
    const float* own = q + head * shape.head_dim + lane % kHalfWarp;
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      x[i] = i * kHalfWarp < shape.tiling.centre_dims ? own[i * kHalfWarp] : 0.0f;
    }
  }
  // The lane's chain of the product.
  __device__ float Times(const ChainCoordinates& other) const {
    float sum = 0;
#pragma unroll
    for (int i = 0; i < kCount; ++i) sum = fmaf(x[i], other.x[i], sum);
    return sum;
  }
};

// Sums kCount values over kCount lanes, in the order of SumChains(). Lane i of these gets the sum
// of value i. All lanes of the warp call it.
template <int kCount>
__device__ inline float SumByLane(const float (&values)[kCount], int lane) {
  if constexpr (kCount == 1) {
    return values[0];
  } else {
    constexpr int kApart = kCount / 2;
    const bool upper = (lane & kApart) != 0;
    float sums[kApart];
#pragma unroll
    for (int i = 0; i < kApart; ++i) {
      const float sent = upper ? values[i] : values[i + kApart];
      const float kept = upper ? values[i + kApart] : values[i];
      sums[i] = kept + __shfl_xor_sync(kFullWarp, sent, kApart);
    }
    return SumByLane(sums, lane);
  }
}

// CentreLogit() of a page for query head lane % 4 of a quartet; that of another head if the group
// has no such head. All lanes of the warp call it.
template <int kFragments>
__device__ inline float QuartetCentreLogit(const AttendShape& shape, const float* q,
                                           const ChainCoordinates<kFragments>& centre, int quartet,
                                           int lane) {
  float own = 0;
#pragma unroll
  for (int pair = 0; pair < 2; ++pair) {
    const int head = min(quartet * 4 + pair * 2 + lane / kHalfWarp, shape.group - 1);
    ChainCoordinates<kFragments> query;
    query.LoadQuery(shape, q, head, lane);
    float sum = query.Times(centre);
#pragma unroll
    for (int apart = kHalfWarp / 2; apart > 0; apart /= 2) {
      sum += __shfl_xor_sync(kFullWarp, sum, apart);
    }
    // Lane 16 i has the sum of head 2 pair + i of the quartet.
    const float received =
        __shfl_sync(kFullWarp, CentreLogit(sum, shape.scale), lane % 2 * kHalfWarp);
    if (lane % 4 / 2 == pair) own = received;
  }
  return own;
}

// Pages that a warp processes together, because reading addresses and centres has a long latency.
// With a quartet of heads, each lane ends up with the logit of one page and head.
inline constexpr int kCentrePagesPerWarp = 8;

// Fills UnitRequest::centre_logits and raises UnitState::reference to each head's largest. All
// lanes of warp `warp` of `warps` call it.
template <int kFragments>
__device__ inline void StoreCentreLogits(const AttendShape& shape, const UnitRequest& u,
                                         int64_t warp, int64_t warps) {
  constexpr int kPages = kCentrePagesPerWarp / 2;
  static_assert(kPages * 4 == kHalfWarp);
  const int lane = threadIdx.x % 32;
  const int half = lane / kHalfWarp;
  const int64_t last = u.scored_page_end() - 1;
  for (int64_t base = u.scored_page_begin() + kCentrePagesPerWarp * warp; base <= last;
       base += kCentrePagesPerWarp * warps) {
    const auto index = [&](int i) { return min(base + 2 * i + half, last); };
    const std::byte* pages[kPages];
    ChainCoordinates<kFragments> centres[kPages];
#pragma unroll
    for (int i = 0; i < kPages; ++i) pages[i] = u.code_pages[index(i)];
#pragma unroll
    for (int i = 0; i < kPages; ++i) centres[i].LoadCentre(shape.tiling, pages[i], lane);
    for (int quartet = 0; quartet * 4 < shape.group; ++quartet) {
      float products[kHalfWarp];  // [4 i + h]: of page i and head h of the quartet
#pragma unroll
      for (int h = 0; h < 4; ++h) {
        ChainCoordinates<kFragments> query;
        query.LoadQuery(shape, u.q, min(quartet * 4 + h, shape.group - 1), lane);
#pragma unroll
        for (int i = 0; i < kPages; ++i) products[4 * i + h] = query.Times(centres[i]);
      }
      const float logit = CentreLogit(SumByLane(products, lane), shape.scale);
      const int head = quartet * 4 + lane % 4;
      if (head < shape.group) {
        u.centre_logits[index(lane % kHalfWarp / 4) * shape.group + head] = logit;
      }
      float largest = logit;
#pragma unroll
      for (int apart = 4; apart < 32; apart *= 2) {
        largest = fmaxf(largest, __shfl_xor_sync(kFullWarp, largest, apart));
      }
      if (lane < 4 && head < shape.group) {
        atomicMax(&u.state->reference[head], OrderedBits(largest));
      }
    }
  }
}

}  // namespace spillway::cuda
