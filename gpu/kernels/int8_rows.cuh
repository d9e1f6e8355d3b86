#pragma once

#include <cuda_bf16.h>

#include "gpu/kernels/device_math.cuh"
#include "host/base/row_format.h"

// Rows of 8 bits (host/base/int8_row.h) in kernels. Rows begin at multiples of 16 bytes.
namespace spillway::cuda {

// ---- reading -------------------------------------------------------------

// Four codes times the scale; exact.
__device__ inline float4 Int8Four(uint32_t codes, float scale) {
  // (2^23 + 128 + code) scale - (2^23 + 128) scale, where the last byte of the first number is code
  // + 128. The second product is exact because it has 24 bits: 17, and the scale's 7.
  const uint32_t bytes = codes ^ 0x80808080u;
  const float zero = -8388736.0f * scale;
  constexpr uint32_t kHead = 0x4B000000u;
  return make_float4(fmaf(__uint_as_float(__byte_perm(bytes, kHead, 0x7440)), scale, zero),
                     fmaf(__uint_as_float(__byte_perm(bytes, kHead, 0x7441)), scale, zero),
                     fmaf(__uint_as_float(__byte_perm(bytes, kHead, 0x7442)), scale, zero),
                     fmaf(__uint_as_float(__byte_perm(bytes, kHead, 0x7443)), scale, zero));
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
  const bool of_value = n < kInt8ValueHighCount;
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
  // The scales and the high parts of the value, in one load: the row may be across the link.
  static_assert(kInt8ValueHighCount == 4);
  const uint4 tail = *reinterpret_cast<const uint4*>(row + Int8ScaleOffset(d));
  const float scale = __uint_as_float(tail.x & 0xFFFF0000u);
  const float4 four = Int8Four(reinterpret_cast<const uint32_t*>(row + d)[i], scale);
  float x[4] = {four.x, four.y, four.z, four.w};
#pragma unroll
  for (int n = 0; n < kInt8ValueHighCount; ++n) {
    const int pair = static_cast<int>((n < 2 ? tail.y : tail.z) >> (n % 2 * 16) & 0xFFFFu);
    const int at = (pair & 255) - 4 * i;
    const float addend = static_cast<float>(static_cast<int8_t>(pair >> 8) * kInt8HighStep) * scale;
#pragma unroll
    for (int e = 0; e < 4; ++e) x[e] += e == at ? addend : 0.0f;
  }
#pragma unroll
  for (float& e : x) e = RoundToDType(format.dtype, e);
  return make_float4(x[0], x[1], x[2], x[3]);
}

// ---- writing -------------------------------------------------------------

// Writes codes and highs of a vector, and its scale. x: the elements lane, lane + 32, ... below d,
// then zeros. All lanes of the warp.
template <int kLaneElements>
__device__ inline void EncodeInt8Vector(DType dtype, int d, const float (&x)[kLaneElements],
                                        int high_count, std::byte* codes, std::byte* highs,
                                        uint16_t* scale_at) {
  const int lane = threadIdx.x % 32;
  uint32_t rank[kLaneElements];
  int high_at[kLaneElements];  // number of the element's high part; -1: it has none
  float largest = 0;
#pragma unroll
  for (int e = 0; e < kLaneElements; ++e) {
    const int i = e * 32 + lane;
    rank[e] = i < d ? Int8Rank(x[e], i) : 0;
    high_at[e] = -1;
    largest = fmaxf(largest, fabsf(x[e]));
  }
  // Fewer elements have a high part than there are, so the largest rank left is above 0, and of one
  // element alone.
#pragma unroll 2
  for (int n = 0; n < high_count; ++n) {
    uint32_t best = 0;
#pragma unroll
    for (int e = 0; e < kLaneElements; ++e) best = max(best, rank[e]);
    best = __reduce_max_sync(kFullWarp, best);
#pragma unroll
    for (int e = 0; e < kLaneElements; ++e) {
      high_at[e] = rank[e] == best ? n : high_at[e];
      rank[e] = rank[e] == best ? 0 : rank[e];
    }
  }
  float rest = 0;
#pragma unroll
  for (int e = 0; e < kLaneElements; ++e) {
    if (high_at[e] < 0) rest = fmaxf(rest, fabsf(x[e]));
  }
  // Floats that are not negative have the order of their bits.
  const auto most = [](float y) {
    return __uint_as_float(__reduce_max_sync(kFullWarp, __float_as_uint(y)));
  };
  const float scale = Int8Scale(most(rest), most(largest));
  const float inverse = Int8InverseScale(scale);
  const float largest_element = LargestElement(dtype);
#pragma unroll
  for (int e = 0; e < kLaneElements; ++e) {
    const int i = e * 32 + lane;
    if (i >= d) break;
    int element = Int8Element(x[e], scale, inverse, largest_element);
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
  std::byte* const highs = row + Int8HighOffset(d);
  std::byte* const key_highs = highs + 2 * kInt8ValueHighCount;
  auto* const scales = reinterpret_cast<uint16_t*>(row + Int8ScaleOffset(d));
  const int end = Int8HighOffset(d) + 2 * Int8HighCount(d);
  for (int i = end + static_cast<int>(threadIdx.x) % 32; i < Int8RowBytes(d); i += 32) {
    row[i] = std::byte{0};
  }
  const auto encode = [&]<int kLaneElements>() {
    // All are loaded before one is used, so that the latency is paid once.
    float x[2][kLaneElements];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
#pragma unroll
      for (int e = 0; e < kLaneElements; ++e) {
        const int i = e * 32 + static_cast<int>(threadIdx.x) % 32;
        x[half][e] = i < d ? load(half, i) : 0.0f;
      }
    }
    EncodeInt8Vector(dtype, d, x[0], Int8KeyHighCount(d), row, key_highs, scales);
    EncodeInt8Vector(dtype, d, x[1], kInt8ValueHighCount, row + d, highs, scales + 1);
  };
  if (d <= 128) {
    encode.template operator()<4>();
  } else {
    encode.template operator()<kHeadDimMax / 32>();
  }
  __syncwarp();
}

// Copies a row, by one warp.
__device__ inline void CopyStoredRow(const std::byte* from, int64_t row_bytes, std::byte* to) {
  for (int i = threadIdx.x % 32; i < row_bytes / 16; i += 32) {
    reinterpret_cast<uint4*>(to)[i] = reinterpret_cast<const uint4*>(from)[i];
  }
}

}  // namespace spillway::cuda
