#pragma once

#include "gpu/kernels/device_math.cuh"
#include "gpu/methods/buckets.cuh"
#include "gpu/methods/request.h"
#include "host/methods/lsh_sampling/lsh_weight.h"

// MagicPIG's sample of the tail: each query head takes the tokens that share enough LSH buckets
// with it. The sample replaces the second draw, as one stratum that is drawn whole; the fold
// weights its rows.
namespace spillway::cuda {

inline constexpr int kLshThreads = 256;

struct LshShape {
  int tables;
  int bits;                      // of a bucket's name
  int64_t offset;                // bytes to the buckets in an index page
  const MethodRequest* methods;  // of the units
};

// Computes the buckets of the unit's query heads. Grid (1, units). Shared memory: a query [d].
__global__ void __launch_bounds__(kLshThreads)
    LshQueryKernel(AttendShape shape, LshShape lsh, const UnitRequest* units) {
  extern __shared__ float x[];
  __shared__ UnitRequest u;
  __shared__ MethodRequest m;
  LoadRequest(lsh.methods + blockIdx.y, m);
  Begin(units + blockIdx.y, u);
  NoteMoment(u.result, kSampleBegins);
  const int tables = lsh.tables;
  for (int g = 0; g < shape.group; ++g) {
    __syncthreads();
    for (int i = threadIdx.x; i < shape.head_dim; i += blockDim.x)
      x[i] = u.q[g * shape.head_dim + i];
    __syncthreads();
    for (int table = threadIdx.x; table < tables; table += blockDim.x) {
      m.query_buckets[g * tables + table] =
          BucketName(m.projections, tables * lsh.bits, lsh.bits, table, x, shape.head_dim);
    }
  }
}

// Finds which query heads take each token, and counts the tokens of each segment that any head
// takes. Grid (segments, units). Shared memory: the query heads' buckets [G][tables].
__global__ void __launch_bounds__(kLshThreads)
    LshCountKernel(AttendShape shape, LshShape lsh, const UnitRequest* units) {
  extern __shared__ uint16_t buckets[];
  __shared__ uint32_t total;
  __shared__ UnitRequest u;
  __shared__ MethodRequest m;
  LoadRequest(lsh.methods + blockIdx.y, m);
  Begin(units + blockIdx.y, u);
  const int tables = lsh.tables;
  const int group = shape.group;
  for (int i = threadIdx.x; i < group * tables; i += blockDim.x) buckets[i] = m.query_buckets[i];
  for (int64_t segment = blockIdx.x; segment < u.segments(); segment += gridDim.x) {
    if (threadIdx.x == 0) total = 0;
    __syncthreads();
    uint32_t taken = 0;
    const int64_t to = min((segment + 1) * kSegmentTokens, u.n);
    for (int64_t t = segment * kSegmentTokens + threadIdx.x; t < to; t += blockDim.x) {
      const int c = u.class_of_bin[BinIndex(u.bins[t], shape.bin_count)];
      const bool heavy = c == kClassHeavy || (c == kClassTie && t >= u.state->heavy_from);
      uint32_t takers = 0;
      if (!heavy && t >= u.begin && t < u.end) {
        const auto* names =
            reinterpret_cast<const uint16_t*>(u.code_pages[t / kPageTokenCount] + lsh.offset) +
            t % kPageTokenCount;
        uint32_t once = 0;  // heads with at least one bucket in common so far
        for (int table = 0; table < tables; ++table) {
          const uint16_t name = names[int64_t{table} * kPageTokenCount];
          for (int g = 0; g < group; ++g) {
            const uint32_t same = static_cast<uint32_t>(name == buckets[g * tables + table]) << g;
            takers |= once & same;
            once |= same;
          }
        }
      }
      static_assert(kLshSharedMin == 2);
      m.takers[t] = static_cast<uint16_t>(takers);
      taken += takers != 0;
    }
    taken = WarpSum(taken);
    if (threadIdx.x % 32 == 0 && taken > 0) atomicAdd(&total, taken);
    __syncthreads();
    if (threadIdx.x == 0) u.segment_counts[segment] = total;
    __syncthreads();
  }
}

// Computes the sample's size, its place in the list and its splits; turns segment_counts into the
// tokens of earlier segments. Grid (units), one warp.
__global__ void LshResolveKernel(const UnitRequest* units) {
  __shared__ UnitRequest u;
  Begin(units + blockIdx.x, u);
  UnitState& s = *u.state;
  const int lane = threadIdx.x;
  int64_t total = 0;
  for (int64_t base = 0; base < u.segments(); base += 32) {
    const int64_t segment = base + lane;
    const uint32_t count = segment < u.segments() ? u.segment_counts[segment] : 0;
    const uint32_t scan = WarpScan(count);
    if (segment < u.segments())
      u.segment_counts[segment] = static_cast<uint32_t>(total + scan - count);
    total += __shfl_sync(kFullWarp, scan, 31);
  }
  const int64_t even = (total + kSplitsWanted - 1) / kSplitsWanted;
  const int64_t rows = max(int64_t{kSplitRowsMin}, (even + 31) / 32 * 32);
  const int splits = static_cast<int>((total + rows - 1) / rows);
  for (int i = lane; i < splits; i += 32) {
    s.splits[1][i] = {1, static_cast<int32_t>(min(rows, total - i * rows)),
                      s.list_count + i * rows};
  }
  __syncwarp();
  if (lane != 0) return;
  s.split_count[1] = splits;
  s.strata = total > 0 ? 1 : 0;
  s.stratum_count[0] = total;
  s.drawn[0] = total;
  s.stratum_first[0] = s.list_count;
  s.list_count += total;
}

// Lists the sample. One warp goes through a segment in token order; grid (segments, units).
__global__ void LshPlaceKernel(int64_t row_bytes, const MethodRequest* methods,
                               const UnitRequest* units) {
  __shared__ UnitRequest u;
  const uint16_t* const takers = methods[blockIdx.y].takers;
  Begin(units + blockIdx.y, u);
  UnitState& s = *u.state;
  const int lane = threadIdx.x;
  for (int64_t segment = blockIdx.x; segment < u.segments(); segment += gridDim.x) {
    int64_t place = s.stratum_first[0] + u.segment_counts[segment];
    unsigned long long missed = 0;
    const int64_t to = min((segment + 1) * kSegmentTokens, u.n);
    for (int64_t base = segment * kSegmentTokens; base < to; base += 32) {
      const int64_t t = base + lane;
      const bool taken = t < to && takers[t] != 0;
      const auto token = static_cast<uint32_t>(t);
      const unsigned all = __ballot_sync(kFullWarp, taken);
      const bool resident = taken && IsResident(u.resident, token);
      if (taken) {
        const int64_t at = place + __popc(all & ((1u << lane) - 1));
        u.list[at] = token;
        u.sources[at] = resident ? ResidentRow(u.resident, row_bytes, token)
                                 : RowAddress(u.row_pages, row_bytes, token);
      }
      place += __popc(all);
      missed += __popc(__ballot_sync(kFullWarp, taken && !resident));
    }
    if (lane == 0 && missed > 0) {
      atomicAdd(reinterpret_cast<unsigned long long*>(&s.moved_count), missed);
    }
  }
}

// For FoldKernel: the logit of a row that a head takes, minus the log of the chance that it does.
class LshLogits {
 public:
  using Context = LshShape;
  static constexpr bool kGathered = false;
  __device__ explicit LshLogits(const Context& lsh)
      : tables_(lsh.tables),
        bits_(lsh.bits),
        takers_(lsh.methods[blockIdx.y].takers),
        centre_(lsh.methods[blockIdx.y].centre) {}
  __device__ float operator()(const AttendShape& shape, const UnitRequest& u, int head,
                              int64_t place, const float* key, float logit) const {
    if ((takers_[u.list[place]] >> head & 1) == 0) return kLshNotTaken;
    const float* q = u.q + head * shape.head_dim;
    double dot = 0, key_sq = 0, query_sq = 0;
    for (int i = 0; i < shape.head_dim; ++i) {
      const double k = key[i] - centre_[i];
      dot += k * q[i];
      key_sq += k * k;
      query_sq += double{q[i]} * q[i];
    }
    return logit -
           static_cast<float>(LshLogWeight(dot, sqrt(query_sq), sqrt(key_sq), bits_, tables_));
  }

 private:
  const int tables_;
  const int bits_;
  const uint16_t* const takers_;
  const float* const centre_;
};

}  // namespace spillway::cuda
