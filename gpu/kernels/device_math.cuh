#pragma once

#include <cuda_fp16.h>

#include <cstddef>
#include <cstdint>

#include "gpu/kernels/attend.h"

// Small functions that kernels share.
namespace spillway::cuda {

inline constexpr unsigned kFullWarp = 0xFFFFFFFFu;

// An order-preserving map of floats (no NaN) to integers, and back.
__device__ inline int32_t OrderedBits(float x) {
  const int32_t bits = __float_as_int(x);
  return bits >= 0 ? bits : bits ^ 0x7FFFFFFF;
}
__device__ inline float FromOrderedBits(int32_t bits) {
  return __int_as_float(bits >= 0 ? bits : bits ^ 0x7FFFFFFF);
}

__device__ inline float BFloat16ToFloat(uint16_t bits) {
  return __uint_as_float(static_cast<uint32_t>(bits) << 16);
}

// Element i of a vector in the rows' dtype.
__device__ inline float LoadElement(DType dtype, const std::byte* base, int i) {
  if (dtype == DType::kF32) return reinterpret_cast<const float*>(base)[i];
  if (dtype == DType::kF16) return __half2float(reinterpret_cast<const __half*>(base)[i]);
  return BFloat16ToFloat(reinterpret_cast<const uint16_t*>(base)[i]);
}

// Four elements of a 16-bit dtype.
__device__ inline float4 WidenFour(DType dtype, uint32_t low, uint32_t high) {
  if (dtype == DType::kBF16) {
    return make_float4(__uint_as_float(low << 16), __uint_as_float(low & 0xFFFF0000u),
                       __uint_as_float(high << 16), __uint_as_float(high & 0xFFFF0000u));
  }
  const float2 a = __half22float2(*reinterpret_cast<const __half2*>(&low));
  const float2 b = __half22float2(*reinterpret_cast<const __half2*>(&high));
  return make_float4(a.x, a.y, b.x, b.y);
}

// Elements [4 i, 4 i + 4) of a vector in the rows' dtype.
__device__ inline float4 LoadFour(DType dtype, const std::byte* base, int i) {
  if (dtype == DType::kF32) return reinterpret_cast<const float4*>(base)[i];
  const uint2 raw = reinterpret_cast<const uint2*>(base)[i];
  return WidenFour(dtype, raw.x, raw.y);
}

// Address of a token's row in its page.
__device__ inline const std::byte* RowAddress(const std::byte* const* pages, int64_t row_bytes,
                                              int64_t token) {
  return pages[token / kPageTokenCount] + (token % kPageTokenCount) * row_bytes;
}

template <typename T>
__device__ inline T WarpSum(T x) {
#pragma unroll
  for (int offset = 16; offset > 0; offset /= 2) x += __shfl_xor_sync(kFullWarp, x, offset);
  return x;
}

__device__ inline float WarpMax(float x) {
#pragma unroll
  for (int offset = 16; offset > 0; offset /= 2) {
    x = fmaxf(x, __shfl_xor_sync(kFullWarp, x, offset));
  }
  return x;
}

// Reduces kCount values, a power of two, over the warp at once. Lane l gets value l kCount / 32;
// the order of the reduction is fixed. All lanes.
template <int kCount, typename Op>
__device__ inline float ReduceByLane(float (&values)[kCount], Op op) {
  const int lane = threadIdx.x % 32;
  int apart = 16;
#pragma unroll
  for (int n = kCount / 2; n >= 1; n /= 2) {
    const bool upper = (lane & apart) != 0;
#pragma unroll
    for (int i = 0; i < n; ++i) {
      const float sent = upper ? values[i] : values[i + n];
      const float kept = upper ? values[i + n] : values[i];
      values[i] = op(kept, __shfl_xor_sync(kFullWarp, sent, apart));
    }
    apart /= 2;
  }
#pragma unroll
  for (int rest = 16 / kCount; rest >= 1; rest /= 2) {
    values[0] = op(values[0], __shfl_xor_sync(kFullWarp, values[0], rest));
  }
  return values[0];
}

// The sum over this lane and those before it.
template <typename T>
__device__ inline T WarpScan(T x) {
#pragma unroll
  for (int offset = 1; offset < 32; offset *= 2) {
    const T other = __shfl_up_sync(kFullWarp, x, offset);
    if (threadIdx.x % 32 >= offset) x += other;
  }
  return x;
}

// Values of a unit are divided by this before they are summed.
__device__ inline float ValueUnit(const UnitRequest& u) {
  return u.statistics != nullptr ? u.statistics->value_unit : 1.0f;
}

// Starts a copy of kBytes, 8 or 16, to shared memory. Both addresses are multiples of kBytes.
template <int kBytes>
__device__ inline void CopyAhead(void* to, const void* from) {
  const auto address = static_cast<uint32_t>(__cvta_generic_to_shared(to));
  if constexpr (kBytes == 16) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(address), "l"(from));
  } else {
    asm volatile("cp.async.ca.shared.global [%0], [%1], 8;" ::"r"(address), "l"(from));
  }
}

// Copies a request to memory that a warp shares. All lanes, of which none reads `to` any more.
template <typename Request>
__device__ inline void LoadByWarp(const Request* from, Request& to) {
  static_assert(sizeof(Request) % 8 == 0);
  const auto* source = reinterpret_cast<const uint64_t*>(from);
  auto* target = reinterpret_cast<uint64_t*>(&to);
  for (int i = threadIdx.x % 32; i < static_cast<int>(sizeof(Request) / 8); i += 32) {
    target[i] = source[i];
  }
  __syncwarp();
}

// Copies a unit's request to shared memory, by one read for all threads. Ends with a barrier.
template <typename Request>
__device__ inline void LoadRequest(const Request* from, Request& to) {
  static_assert(sizeof(Request) % 8 == 0);
  const auto* source = reinterpret_cast<const uint64_t*>(from);
  auto* target = reinterpret_cast<uint64_t*>(&to);
  for (int i = threadIdx.x; i < static_cast<int>(sizeof(Request) / 8); i += blockDim.x) {
    target[i] = source[i];
  }
  __syncthreads();
}

// A kernel of an attend may begin while the previous one still runs. It waits for the end of all
// earlier kernels, and only then lets the next one begin. So before its wait, it can read what the
// kernels before the previous one have written.
__device__ inline void GridDependencyWait() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}
__device__ inline void TriggerDependents() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;");
#endif
}

// Time in ns, by a clock that all multiprocessors share.
__device__ inline uint64_t GlobalTime() {
  uint64_t ns;
  asm volatile("mov.u64 %0, %globaltimer;" : "=l"(ns));
  return ns;
}
// Notes the time of a moment in the result of the wave's first unit, which the grid's first block
// has. Does not wait for the write.
__device__ inline void NoteMoment(UnitResult* result, WaveMoment moment) {
  if ((blockIdx.x | blockIdx.y | blockIdx.z | threadIdx.x) == 0) {
    result->moments[moment] = GlobalTime();
  }
}

// How every kernel of an attend begins, except the first, which writes the requests, and the
// second.
__device__ inline void Begin(const UnitRequest* from, UnitRequest& to) {
  LoadRequest(from, to);
  GridDependencyWait();
  TriggerDependents();
}
// How the second begins: the first may not have written the requests before the wait.
__device__ inline void BeginSecond(const UnitRequest* from, UnitRequest& to) {
  GridDependencyWait();
  TriggerDependents();
  LoadRequest(from, to);
}

// Called once by each of `count` blocks, by all threads. True in the last block, which then sees
// what the others wrote before their calls. counter: 0 at first.
__device__ inline bool IsLastBlock(int count, uint32_t& counter) {
  __shared__ bool last;
  __syncthreads();
  if (threadIdx.x == 0) {
    // The barriers extend the fences to all threads of the block.
    __threadfence();
    last = atomicAdd(&counter, 1) + 1 == static_cast<uint32_t>(count);
    __threadfence();
  }
  __syncthreads();
  return last;
}

// Whether the row of an indexed token is in the GPU's sink or resident sample.
__device__ inline bool IsSampled(const ResidentRows& rows, uint32_t token) {
  if (rows.pages == nullptr) return false;
  const uint32_t slot = token % kPageTokenCount;
  return (rows.pages[token / kPageTokenCount].mask[slot / 32] >> (slot % 32) & 1u) != 0;
}
// The address of that row. REQUIRES: IsSampled().
__device__ inline const std::byte* SampledRow(const ResidentRows& rows, int64_t row_bytes,
                                              uint32_t token) {
  const ResidentPage& page = rows.pages[token / kPageTokenCount];
  const uint32_t word = token % kPageTokenCount / 32;
  uint32_t rank = page.before + __popc(page.mask[word] & ((1u << (token % 32)) - 1));
  for (uint32_t w = 0; w < word; ++w) rank += __popc(page.mask[w]);
  return rows.row_pages[rank / kResidentPageRows] + (rank % kResidentPageRows) * row_bytes;
}

// Whether the GPU holds the row of a token outside the window.
__device__ inline bool IsResident(const ResidentRows& rows, uint32_t token) {
  return token < rows.whole_end || IsSampled(rows, token);
}
// The address of that row. REQUIRES: IsResident().
__device__ inline const std::byte* ResidentRow(const ResidentRows& rows, int64_t row_bytes,
                                               uint32_t token) {
  return token < rows.whole_end ? RowAddress(rows.whole_pages, row_bytes, token)
                                : SampledRow(rows, row_bytes, token);
}
// The address of a window token's row. REQUIRES: it is in a whole page or in the ring.
__device__ inline const std::byte* WindowRow(const ResidentRows& rows, int64_t row_bytes,
                                             uint32_t token) {
  return token < rows.whole_end ? RowAddress(rows.whole_pages, row_bytes, token)
                                : rows.recent + token % kRecentRows * row_bytes;
}

// Numbers of rows of the sink (its last ones) and of the window (its first ones) that the GPU does
// not hold. If whole pages end before the ring, all window rows before the ring count.
__device__ inline int64_t MissedSink(const UnitRequest& u) {
  return max(u.sink - max(u.resident.sink, u.resident.whole_end), int64_t{0});
}
__device__ inline int64_t MissedWindow(const UnitRequest& u) {
  if (u.resident.whole_end >= min(u.resident.recent_begin, u.n)) return 0;
  return min(max(u.resident.recent_begin - (u.n - u.window), int64_t{0}), u.window);
}

// Index of a bin in class_of_bin, where kNoBin and kHeavyBin follow the score bins.
__device__ inline int BinIndex(int bin, int bin_count) {
  return bin < bin_count ? bin : bin_count + (bin & 1);
}

// Bytes of class_of_bin, in whole uint4.
__host__ __device__ inline int ClassBytes(int bin_count) { return (bin_count + 2 + 15) / 16 * 16; }

// The stratum of a tail token's bin. Strata descend; lowest_bin of the last is 0.
__device__ inline int StratumOf(const uint16_t* lowest_bin, int bin) {
  int h = 0;
  while (bin < lowest_bin[h]) ++h;
  return h;
}

}  // namespace spillway::cuda
