#pragma once

#include <cuda/ptx>

#include "gpu/kernels/device_math.cuh"

// Copies listed rows from pinned host memory to the GPU, in token order and so nearly in address
// order. All warps work side by side in the list, so that the addresses in flight stay close
// together: the link is limited by address translation, not by bytes.
namespace spillway::cuda {

inline constexpr int kGatherThreads = 512;

// Units that one launch gathers for; more need further launches.
inline constexpr int kGatherUnitsMax = 256;

// The units' lists, one after the other, in shared memory.
struct GatherLists {
  int64_t ends[kGatherUnitsMax];  // rows of units [0, i]
  const std::byte* const* lists[kGatherUnitsMax];
  std::byte* stagings[kGatherUnitsMax];

  // How the kernel begins; waits for earlier kernels. All threads call it.
  __device__ void Load(const UnitRequest* units, int unit_count, int64_t row_bytes, int phase) {
    for (int i = threadIdx.x; i < unit_count; i += blockDim.x) {
      lists[i] = units[i].gather;
      stagings[i] = units[i].staging;
    }
    GridDependencyWait();
    NoteMoment(units->result, phase == 0 ? kPilotFoldBegins : kSampleFoldBegins);
    for (int i = threadIdx.x; i < unit_count; i += blockDim.x) {
      const UnitState& state = *units[i].state;
      ends[i] = state.gather_count;
      stagings[i] += state.gather_first * row_bytes;
    }
    __syncthreads();
    if (threadIdx.x < 32) {
      constexpr int kOfLane = kGatherUnitsMax / 32;
      const int first = static_cast<int>(threadIdx.x) * kOfLane;
      int64_t sum = 0;
      for (int i = first; i < min(first + kOfLane, unit_count); ++i) ends[i] = sum += ends[i];
      const int64_t before = WarpScan(sum) - sum;
      for (int i = first; i < min(first + kOfLane, unit_count); ++i) ends[i] += before;
    }
    __syncthreads();
  }
  // Where row `at` of all lists comes from and goes to; from: null if another unit brings it. unit:
  // 0 at first, then as the last call left it; `at` must not decrease.
  __device__ void Find(int64_t at, int64_t row_bytes, int& unit, const std::byte*& from,
                       std::byte*& to) const {
    while (at >= ends[unit]) ++unit;
    const int64_t turn = at - (unit > 0 ? ends[unit - 1] : 0);
    from = lists[unit][turn];
    to = stagings[unit] + turn * row_bytes;
  }
};

// Gathers with 16-byte loads. Warp w of W copies rows w, w + W, ... of the lists. Grid (blocks); at
// most kGatherUnitsMax units.
__global__ void __launch_bounds__(kGatherThreads)
    GatherKernel(int64_t row_bytes, const UnitRequest* units, int unit_count, int phase) {
  constexpr int kRowsInFlight = 4;
  __shared__ GatherLists lists;
  lists.Load(units, unit_count, row_bytes, phase);
  const int lane = threadIdx.x % 32;
  const int64_t warps = int64_t{gridDim.x} * (blockDim.x / 32);
  const int loads = static_cast<int>(row_bytes / 16);
  const int64_t count = lists.ends[unit_count - 1];
  int unit = 0;
  for (int64_t i = int64_t{blockIdx.x} * (blockDim.x / 32) + threadIdx.x / 32; i < count;
       i += kRowsInFlight * warps) {
    const uint4* from[kRowsInFlight];
    uint4* to[kRowsInFlight];
#pragma unroll
    for (int r = 0; r < kRowsInFlight; ++r) {
      const int64_t at = i + r * warps;
      from[r] = nullptr;
      if (at >= count) continue;
      const std::byte* source;
      std::byte* target;
      lists.Find(at, row_bytes, unit, source, target);
      from[r] = reinterpret_cast<const uint4*>(source);
      to[r] = reinterpret_cast<uint4*>(target);
    }
    for (int j = lane; j < loads; j += 32) {
      uint4 data[kRowsInFlight];
#pragma unroll
      for (int r = 0; r < kRowsInFlight; ++r) {
        if (from[r] != nullptr) data[r] = from[r][j];
      }
#pragma unroll
      for (int r = 0; r < kRowsInFlight; ++r) {
        if (from[r] != nullptr) to[r][j] = data[r];
      }
    }
  }
}

inline constexpr int kBulkWarps = 8;
inline constexpr int kBulkStages = 4;
inline constexpr int kBulkStageBytes = 4096;
// More than half of an SM's shared memory, so that an SM runs one block.
inline constexpr int kBulkSharedBytes = kBulkWarps * kBulkStages * kBulkStageBytes;
// What a warp knows of its ring.
struct BulkRing {
  uint64_t barriers[kBulkStages];
  std::byte* targets[kBulkStages][32];
};
// Static shared memory of GatherBulkKernel.
inline constexpr int kBulkStaticBytes = sizeof(GatherLists) + kBulkWarps * sizeof(BulkRing);

// Gathers with bulk copies, which keep more scattered rows in flight than loads do. Each warp has a
// ring of stages; each lane copies a row of a stage in and out again. Warp w of W takes runs w, w +
// W, ... of up to 32 rows. apart: Wave::gathers_apart. Grid (blocks); at most kGatherUnitsMax
// units; compute capability 9.0. Shared memory: at least kBulkSharedBytes.
__global__ void __launch_bounds__(kBulkWarps * 32, 1)
    GatherBulkKernel(int row_bytes, const UnitRequest* units, int unit_count, int phase,
                     bool apart) {
#if __CUDA_ARCH__ >= 900
  namespace ptx = ::cuda::ptx;
  extern __shared__ __align__(128) std::byte rings[];
  __shared__ GatherLists lists;
  __shared__ BulkRing ring_states[kBulkWarps];
  const int warp = threadIdx.x / 32;
  const int lane = threadIdx.x % 32;
  BulkRing& state = ring_states[warp];
  if (lane == 0) {
    for (int s = 0; s < kBulkStages; ++s) ptx::mbarrier_init(&state.barriers[s], 1);
    // Bulk copies access the barriers through the async proxy.
    ptx::fence_proxy_async(ptx::space_shared);
  }
  lists.Load(units, unit_count, row_bytes, phase);
  const int64_t count = lists.ends[unit_count - 1];
  const int run_rows = min(32, kBulkStageBytes / row_bytes);
  const int64_t runs = (count + run_rows - 1) / run_rows;
  const int64_t first = int64_t{blockIdx.x} * kBulkWarps + warp;
  const int64_t step = int64_t{gridDim.x} * kBulkWarps;
  const int64_t own = first < runs ? (runs - first + step - 1) / step : 0;
  std::byte* const ring = rings + warp * kBulkStages * kBulkStageBytes;
  const auto rows_of = [&](int64_t i) {
    return static_cast<int>(min(int64_t{run_rows}, count - (first + i * step) * run_rows));
  };

  int unit = 0;
  const std::byte* from = nullptr;  // of the run that is copied in next
  std::byte* to = nullptr;
  const auto look_up = [&](int64_t i) {
    from = nullptr;
    if (i < own && lane < rows_of(i)) {
      lists.Find((first + i * step) * run_rows + lane, row_bytes, unit, from, to);
    }
  };
  const auto fill = [&](int64_t i) {
    const int s = static_cast<int>(i % kBulkStages);
    const int rows = __popc(__ballot_sync(kFullWarp, from != nullptr));
    state.targets[s][lane] = from != nullptr ? to : nullptr;
    if (lane == 0) {
      ptx::mbarrier_arrive_expect_tx(ptx::sem_release, ptx::scope_cta, ptx::space_shared,
                                     &state.barriers[s], rows * row_bytes);
    }
    // The bytes must be announced before the first one arrives.
    __syncwarp();
    if (from != nullptr) {
      ptx::cp_async_bulk(ptx::space_cluster, ptx::space_global,
                         ring + s * kBulkStageBytes + lane * row_bytes, from, row_bytes,
                         &state.barriers[s]);
    }
    look_up(i + 1);
  };
  look_up(0);
  for (int64_t i = 0; i < min(own, int64_t{kBulkStages}); ++i) fill(i);
  // The next kernel is the fold, whose blocks fill the SMs. Where other waves' kernels run at once,
  // it begins when what is left takes about as long as its launch.
  if (!apart || own < 2) TriggerDependents();
  for (int64_t i = 0; i < own; ++i) {
    if (apart && i > 0 && i + 1 == own) TriggerDependents();
    const int s = static_cast<int>(i % kBulkStages);
    while (!ptx::mbarrier_try_wait_parity(&state.barriers[s], i / kBulkStages % 2)) {
    }
    if (state.targets[s][lane] != nullptr) {
      ptx::cp_async_bulk(ptx::space_global, ptx::space_shared, state.targets[s][lane],
                         ring + s * kBulkStageBytes + lane * row_bytes, row_bytes);
    }
    // Lanes that copy nothing out commit too, because each lane counts its own groups.
    ptx::cp_async_bulk_commit_group();
    // The previous stage has had one turn to be copied out. It is filled again once no lane's copy
    // reads it any more.
    if (i > 0 && i - 1 + kBulkStages < own) {
      ptx::cp_async_bulk_wait_group_read(ptx::n32_t<1>{});
      __syncwarp();
      fill(i - 1 + kBulkStages);
    }
  }
  ptx::cp_async_bulk_wait_group(ptx::n32_t<0>{});
#endif
}

// See LaunchStagePages(). Grid (blocks); a block copies one page at a time.
__global__ void StagePagesKernel(const std::byte* const* from, int64_t capacity, int head_count,
                                 int64_t page_count, int64_t page_bytes, std::byte* to) {
  constexpr int kInFlight = 4;
  const int64_t loads = page_bytes / 16;
  for (int64_t i = blockIdx.x; i < head_count * page_count; i += gridDim.x) {
    const auto* source =
        reinterpret_cast<const uint4*>(from[i / page_count * capacity + i % page_count]);
    auto* target = reinterpret_cast<uint4*>(to + i * page_bytes);
    for (int64_t base = threadIdx.x; base < loads; base += kInFlight * blockDim.x) {
      uint4 data[kInFlight];
#pragma unroll
      for (int f = 0; f < kInFlight; ++f) {
        const int64_t j = base + f * blockDim.x;
        if (j < loads) data[f] = source[j];
      }
#pragma unroll
      for (int f = 0; f < kInFlight; ++f) {
        const int64_t j = base + f * blockDim.x;
        if (j < loads) target[j] = data[f];
      }
    }
  }
}

}  // namespace spillway::cuda
