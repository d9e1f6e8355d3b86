#pragma once

#include <cuda_bf16.h>

#include "gpu/kernels/device_math.cuh"
#include "host/base/row_format.h"

// Rows of 8 bits (host/core/int8_row.h) in kernels. Rows begin at multiples of 16 bytes.
namespace spillway::cuda {

// ---- reading -------------------------------------------------------------

// Four codes times the scale; exact.
__device__ inline float4 Int8Four(uint32_t codes, float scale) {
  // 2^23 + 128 + code, whose last byte is code + 128.
  const uint32_t bytes = codes ^ 0x80808080u;
  constexpr float kZero = 8388736.0f;
  constexpr uint32_t kHead = 0x4B000000u;
  return make_float4((__uint_as_float(__byte_perm(bytes, kHead, 0x7440)) - kZero) * scale,
                     (__uint_as_float(__byte_perm(bytes, kHead, 0x7441)) - kZero) * scale,
                     (__uint_as_float(__byte_perm(bytes, kHead, 0x7442)) - kZero) * scale,
                     (__uint_as_float(__byte_perm(bytes, kHead, 0x7443)) - kZero) * scale);
}

// Scales of K (x) and V (y).
__device__ inline float2 Int8Scales(int d, const std::byte* row) {
  const uint32_t both = *reinterpret_cast<const uint32_t*>(row + Int8ScaleOffset(d));
  return make_float2(__uint_as_float(both << 16), __uint_as_float(both & 0xFFFF0000u));
}

// One of the elements with a high part.
struct Int8HighPart {
  int element;  // in [0, 2 d): of K, then of V
  int high;
  bool of_value;
};
__device__ inline Int8HighPart LoadHighPart(int d, const std::byte* row, int n) {
  const int pair = reinterpret_cast<const uint16_t*>(row + Int8HighOffset(d))[n];
  const bool of_value = n >= Int8KeyHighCount(d);
  return {(pair & 255) + (of_value ? d : 0), static_cast<int8_t>(pair >> 8), of_value};
}
// What a high part adds to its element; exact.
__device__ inline float Int8Addend(const Int8HighPart& part, float2 scales) {
  return static_cast<float>(part.high * kInt8HighStep) * (part.of_value ? scales.y : scales.x);
}

// Eight elements in 16 bits, rounded.
__device__ inline uint4 PackEight(DType dtype, float4 low, float4 high) {
  const auto pack = [&](float a, float b) {
    if (dtype == DType::kBF16) {
      const __nv_bfloat162 two = __floats2bfloat162_rn(a, b);
      return *reinterpret_cast<const uint32_t*>(&two);
    }
    const __half2 two = __floats2half2_rn(a, b);
    return *reinterpret_cast<const uint32_t*>(&two);
  };
  return make_uint4(pack(low.x, low.y), pack(low.z, low.w), pack(high.x, high.y),
                    pack(high.z, high.w));
}
// Stores element i of a vector in the dtype, rounded.
__device__ inline void StoreRounded(DType dtype, float x, int i, std::byte* vector) {
  if (dtype == DType::kF32) {
    reinterpret_cast<float*>(vector)[i] = x;
  } else if (dtype == DType::kBF16) {
    reinterpret_cast<__nv_bfloat16*>(vector)[i] = __float2bfloat16_rn(x);
  } else {
    reinterpret_cast<__half*>(vector)[i] = __float2half_rn(x);
  }
}
// The same for elements [8 i, 8 i + 8).
__device__ inline void StoreEight(DType dtype, float4 low, float4 high, int i, std::byte* vector) {
  if (dtype == DType::kF32) {
    reinterpret_cast<float4*>(vector)[2 * i] = low;
    reinterpret_cast<float4*>(vector)[2 * i + 1] = high;
  } else {
    reinterpret_cast<uint4*>(vector)[i] = PackEight(dtype, low, high);
  }
}

// Decodes a row by `parts` neighbouring lanes of a warp, of which this one is `part`. eight(i, low,
// high) takes elements [8 i, 8 i + 8) of [K | V]; later, one(element, x) takes those with a high
// part, once more. They are not rounded yet. All lanes of the warp.
template <typename Eight, typename One>
__device__ inline void DecodeInt8Row(int d, const std::byte* row, int part, int parts, Eight eight,
                                     One one) {
  const float2 scales = Int8Scales(d, row);
  const int of_key = d / 8;
  for (int i = part; i < 2 * of_key; i += parts) {
    const uint2 codes = reinterpret_cast<const uint2*>(row)[i];
    const float scale = i < of_key ? scales.x : scales.y;
    eight(i, Int8Four(codes.x, scale), Int8Four(codes.y, scale));
  }
  __syncwarp();
  for (int n = part; n < Int8HighCount(d); n += parts) {
    const Int8HighPart high = LoadHighPart(d, row, n);
    const int code = reinterpret_cast<const int8_t*>(row)[high.element];
    one(high.element, Int8Product(code, high.high, high.of_value ? scales.y : scales.x));
  }
}

// Elements [4 i, 4 i + 4) of a stored row's value, as fp32.
__device__ inline float4 ValueFour(const RowFormat& format, const std::byte* row, int i) {
  const int d = format.head_dim;
  if (format.type == RowType::kElements) {
    return LoadFour(format.dtype, row + format.row_bytes() / 2, i);
  }
  const float2 scales = Int8Scales(d, row);
  const float4 four = Int8Four(reinterpret_cast<const uint32_t*>(row + d)[i], scales.y);
  float x[4] = {four.x, four.y, four.z, four.w};
#pragma unroll
  for (int n = 0; n < kInt8ValueHighCount; ++n) {
    const Int8HighPart high = LoadHighPart(d, row, Int8KeyHighCount(d) + n);
    const int at = high.element - d - 4 * i;
#pragma unroll
    for (int e = 0; e < 4; ++e) x[e] += e == at ? Int8Addend(high, scales) : 0.0f;
  }
#pragma unroll
  for (float& e : x) e = RoundToDType(format.dtype, e);
  return make_float4(x[0], x[1], x[2], x[3]);
}

// ---- writing -------------------------------------------------------------

// Writes codes and highs of a vector, and its scale. load(i): its element i. All lanes of the warp.
template <typename Load>
__device__ inline void EncodeInt8Vector(DType dtype, int d, Load load, int high_count,
                                        std::byte* codes, std::byte* highs, uint16_t* scale_at) {
  constexpr int kLaneElements = kHeadDimMax / 32;
  const int lane = threadIdx.x % 32;
  float x[kLaneElements];
  uint32_t rank[kLaneElements];
  int high_at[kLaneElements];  // number of the element's high part; -1: it has none
  float largest = 0;
#pragma unroll
  for (int e = 0; e < kLaneElements; ++e) {
    const int i = e * 32 + lane;
    const bool in = i < d;
    x[e] = in ? load(i) : 0.0f;
    rank[e] = in ? Int8Rank(x[e], i) : 0;
    high_at[e] = -1;
    largest = fmaxf(largest, fabsf(x[e]));
  }
  for (int n = 0; n < high_count; ++n) {
    uint32_t best = 0;
#pragma unroll
    for (int e = 0; e < kLaneElements; ++e) best = max(best, rank[e]);
    best = __reduce_max_sync(kFullWarp, best);
#pragma unroll
    for (int e = 0; e < kLaneElements; ++e) {
      if (rank[e] != best || e * 32 + lane != Int8ElementOf(best)) continue;
      rank[e] = 0;
      high_at[e] = n;
    }
  }
  float rest = 0;
#pragma unroll
  for (int e = 0; e < kLaneElements; ++e) {
    if (high_at[e] < 0) rest = fmaxf(rest, fabsf(x[e]));
  }
  const float scale = Int8Scale(WarpMax(rest), WarpMax(largest));
  const float largest_element = LargestElement(dtype);
#pragma unroll
  for (int e = 0; e < kLaneElements; ++e) {
    const int i = e * 32 + lane;
    if (i >= d) break;
    int element = Int8Element(x[e], scale, largest_element);
    if (high_at[e] >= 0) {
      const int high = Int8High(element);
      element -= high * kInt8HighStep;
      highs[2 * high_at[e]] = static_cast<std::byte>(i);
      highs[2 * high_at[e] + 1] = static_cast<std::byte>(high);
    }
    codes[i] = static_cast<std::byte>(element);
  }
  if (lane == 0) *scale_at = static_cast<uint16_t>(__float_as_uint(scale) >> 16);
}

// Writes a row to shared memory. load(half, i): element i of K (half 0) or V, which is finite. All
// lanes of the warp; they see the row afterwards.
template <typename Load>
__device__ inline void EncodeInt8Row(DType dtype, int d, Load load, std::byte* row) {
  const int keys = Int8KeyHighCount(d);
  std::byte* const highs = row + Int8HighOffset(d);
  auto* const scales = reinterpret_cast<uint16_t*>(row + Int8ScaleOffset(d));
  EncodeInt8Vector(
      dtype, d, [&](int i) { return load(0, i); }, keys, row, highs, scales);
  EncodeInt8Vector(
      dtype, d, [&](int i) { return load(1, i); }, kInt8ValueHighCount, row + d, highs + 2 * keys,
      scales + 1);
  __syncwarp();
}

// Copies a row, by one warp.
__device__ inline void CopyStoredRow(const std::byte* from, int64_t row_bytes, std::byte* to) {
  for (int i = threadIdx.x % 32; i < row_bytes / 16; i += 32) {
    reinterpret_cast<uint4*>(to)[i] = reinterpret_cast<const uint4*>(from)[i];
  }
}

}  // namespace spillway::cuda
