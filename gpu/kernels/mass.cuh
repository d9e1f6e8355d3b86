#pragma once

#include "gpu/kernels/bin_sums.cuh"
#include "host/core/page_index.h"

// Heavy sets by mass (Twilight's top-p): every query head has its own threshold, and a token is
// heavy if any head of the group selects it. One more set selects the strays, by the bins of the
// group.
namespace spillway::cuda {

// The bins, by token, that are compared with a set's threshold.
__device__ inline const uint16_t* SetBins(const UnitRequest& u, int group, int set) {
  return set < group ? u.head_bins + set * u.n : u.bins;
}

// Computes the histogram of each query head's own bins. Grid (blocks, units, heads).
__global__ void CountHeadBinsKernel(const UnitRequest* units) {
  __shared__ uint32_t histogram[kScoreBinCount];
  __shared__ UnitRequest u;
  Begin(units + blockIdx.y, u);
  NoteMoment(u.result, kCutBegins);
  const int head = blockIdx.z;
  for (int i = threadIdx.x; i < kScoreBinCount; i += blockDim.x) histogram[i] = 0;
  __syncthreads();
  const uint16_t* bins = u.head_bins + head * u.n;
  for (int64_t t = u.begin + blockIdx.x * int64_t{blockDim.x} + threadIdx.x; t < u.end;
       t += int64_t{gridDim.x} * blockDim.x) {
    atomicAdd(&histogram[bins[t]], 1u);
  }
  __syncthreads();
  for (int i = threadIdx.x; i < kScoreBinCount; i += blockDim.x) {
    if (histogram[i] > 0) atomicAdd(&u.head_histograms[head * kScoreBinCount + i], histogram[i]);
  }
}

// Finds the threshold of each head, and that of the strays. Sums over bins have the same order as
// on the CPU device. Grid (heads + 1, units), one warp per block.
__global__ void HeadThresholdKernel(AttendShape shape, const UnitRequest* units) {
  __shared__ uint16_t used[kScoreBinCount];  // bins with tokens, ascending
  __shared__ uint32_t counts[kScoreBinCount];
  __shared__ UnitRequest u;
  Begin(units + blockIdx.y, u);
  const int head = blockIdx.x;
  if (head == shape.group) {
    if (threadIdx.x != 0) return;
    const int64_t strays = ScoredStrays(shape, u);
    const HeavySet set = HeavySet::Of(0, false, strays, u.terms.row_count_max, u.sink, u.window);
    u.state->heavy_set = set;
    u.state->head_bin[head] = kStrayBin;
    u.state->head_skip[head] = strays - set.strays;
    return;
  }
  const uint32_t* histogram = u.head_histograms + head * kScoreBinCount;
  int found = 0;
  for (int base = 0; base < kScoreBinCount; base += 32) {
    const uint32_t count = histogram[base + threadIdx.x];
    const unsigned mask = __ballot_sync(kFullWarp, count > 0);
    if (count > 0) {
      const int at = found + __popc(mask & ((1u << threadIdx.x) - 1));
      used[at] = static_cast<uint16_t>(base + threadIdx.x);
      counts[at] = count;
    }
    found += __popc(mask);
  }
  __syncwarp();
  if (threadIdx.x != 0) return;
  const auto threshold =
      HeavyByMass(std::span<const uint16_t>(used, found), std::span<const uint32_t>(counts, found),
                  u.heavy_mass, u.heavy_floor, u.heavy_ceiling);
  u.state->head_bin[head] = threshold.bin;
  u.state->head_skip[head] = int64_t{histogram[threshold.bin]} - threshold.take;
}

// Counts each set's ties (tokens in its threshold bin), per segment. Grid (segments, units).
__global__ void CountHeadTiesKernel(int group, const UnitRequest* units) {
  __shared__ UnitRequest u;
  Begin(units + blockIdx.y, u);
  for (int64_t segment = blockIdx.x; segment < u.segments(); segment += gridDim.x) {
    const int64_t from = max(segment * kSegmentTokens, u.begin);
    const int64_t to = min((segment + 1) * kSegmentTokens, u.end);
    for (int h = 0; h <= group; ++h) {
      const int bin = u.state->head_bin[h];
      const uint16_t* bins = SetBins(u, group, h);
      uint32_t count = 0;
      for (int64_t t = from + threadIdx.x; t < to; t += blockDim.x) count += bins[t] == bin;
      count = WarpSum(count);
      if (threadIdx.x % 32 == 0 && count > 0)
        atomicAdd(&u.head_ties[h * u.segments() + segment], count);
    }
  }
}

// Marks heavy tokens and removes them from the group's histogram. One warp goes through a segment
// in token order. Grid (segments, units).
__global__ void MarkHeavyKernel(int group, const UnitRequest* units) {
  __shared__ UnitRequest u;
  Begin(units + blockIdx.y, u);
  UnitState& state = *u.state;
  const int lane = threadIdx.x;
  for (int64_t segment = blockIdx.x; segment < u.segments(); segment += gridDim.x) {
    // rank[h]: ties of set h before this segment. The first head_skip ties of a set are not heavy.
    int64_t rank[kGroupMax + 1];
    for (int h = 0; h <= group; ++h) {
      int64_t before = 0;
      for (int64_t c = lane; c < segment; c += 32) before += u.head_ties[h * u.segments() + c];
      rank[h] = WarpSum(before);
    }
    unsigned long long marked = 0;
    const int64_t to = min((segment + 1) * kSegmentTokens, u.end);
    for (int64_t base = segment * kSegmentTokens; base < to; base += 32) {
      const int64_t t = base + lane;
      const bool scored = t >= u.begin && t < to;
      bool heavy = false;
      for (int h = 0; h <= group; ++h) {
        const int bin = scored ? SetBins(u, group, h)[t] : -1;
        const bool tie = bin == state.head_bin[h];
        const unsigned ties = __ballot_sync(kFullWarp, tie);
        heavy |= bin > state.head_bin[h] ||
                 (tie && rank[h] + __popc(ties & ((1u << lane) - 1)) >= state.head_skip[h]);
        rank[h] += __popc(ties);
      }
      if (heavy) {
        atomicSub(&u.histogram[u.bins[t]], 1u);
        u.bins[t] = kHeavyBin;
      }
      marked += __popc(__ballot_sync(kFullWarp, heavy));
    }
    if (lane == 0 && marked > 0) atomicAdd(&state.heavy_count, marked);
  }
}

}  // namespace spillway::cuda
