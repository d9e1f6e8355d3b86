#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstddef>
#include <cstdint>

#include "gpu/kernels/attend.h"

// Small things that kernels share.
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

// Elements [4 i, 4 i + 4) of a vector in the rows' dtype.
__device__ inline float4 LoadFour(DType dtype, const std::byte* base, int i) {
  if (dtype == DType::kF32) return reinterpret_cast<const float4*>(base)[i];
  const uint2 raw = reinterpret_cast<const uint2*>(base)[i];
  if (dtype == DType::kBF16) {
    return make_float4(__uint_as_float(raw.x << 16), __uint_as_float(raw.x & 0xFFFF0000u),
                       __uint_as_float(raw.y << 16), __uint_as_float(raw.y & 0xFFFF0000u));
  }
  const float2 low = __half22float2(*reinterpret_cast<const __half2*>(&raw.x));
  const float2 high = __half22float2(*reinterpret_cast<const __half2*>(&raw.y));
  return make_float4(low.x, low.y, high.x, high.y);
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

// A unit's request in shared memory: one read of GPU memory for all threads.
__device__ inline void LoadRequest(const UnitRequest* from, UnitRequest& to) {
  static_assert(sizeof(UnitRequest) % 8 == 0);
  const auto* source = reinterpret_cast<const uint64_t*>(from);
  auto* target = reinterpret_cast<uint64_t*>(&to);
  for (int i = threadIdx.x; i < static_cast<int>(sizeof(UnitRequest) / 8); i += blockDim.x) {
    target[i] = source[i];
  }
  __syncthreads();
}

// The stratum of a tail token's bin: strata descend, lowest_bin[last] is 0.
__device__ inline int StratumOf(const uint16_t* lowest_bin, int bin) {
  int h = 0;
  while (bin < lowest_bin[h]) ++h;
  return h;
}

// Rows that each stratum's pilot asks for (policy.pilot_token_count, less
// where row_count_max leaves less; small strata whole).
__device__ inline int64_t PilotCount(const UnitRequest& u, const UnitState& s, int h) {
  const int64_t share = s.rows_left / (2 * s.strata);
  const int64_t each = u.pilot_count < share ? u.pilot_count : share;
  return s.stratum_count[h] > 2 * each ? each : s.stratum_count[h];
}

}  // namespace spillway::cuda
