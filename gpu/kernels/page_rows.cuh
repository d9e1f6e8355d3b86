#pragma once

#include <cmath>

#include "gpu/kernels/encode.h"
#include "gpu/kernels/int8_rows.cuh"
#include "host/core/page_index.h"

// Functions that the kernels of the page index share. They round at the same points as the CPU
// (host/cpu/page_encoder.cc).
namespace spillway::cuda {

__device__ inline uint16_t FloatToBFloat16(float x) {
  const uint32_t bits = __float_as_uint(x);
  return static_cast<uint16_t>((bits + 0x7FFFu + (bits >> 16 & 1)) >> 16);
}

// Elements of a vector in a 16-byte load.
__device__ inline int PieceElements(DType dtype) { return dtype == DType::kF32 ? 4 : 8; }

__device__ inline float Divisor(float largest) { return largest > 0 ? largest : 1.0f; }

// Divides numbers by the largest of them, with the same rounding as a division.
class Quotient {
 public:
  explicit __device__ Quotient(float largest) {
    divisor_ = Divisor(largest);
    inverse_ = __frcp_rn(divisor_);
    const bool far = divisor_ < kSmall || divisor_ > 1 / kSmall;
    least_ = far ? INFINITY : fmaxf(divisor_, 1.0f) * kSmall;
  }

  // Whether Fast() gives the same result as Of(): nothing in it underflows.
  __device__ bool Takes(float x) const { return fabsf(x) >= least_; }
  // x times the rounded inverse, corrected once by the remainder: the float nearest to the
  // quotient. Before its last rounding, the result is within 2^-21 of a unit in the last place. The
  // few quotients of 24-bit numbers that lie so near to the midpoint of two floats (x 2^k - m d = r
  // has few solutions for small r) are all rounded the right way.
  __device__ float Fast(float x) const {
    const float q = x * inverse_;
    return fmaf(fmaf(-q, divisor_, x), inverse_, q);
  }
  __device__ float Of(float x) const { return __fdiv_rn(x, divisor_); }

 private:
  static constexpr float kSmall = 0x1p-100f;

  float divisor_;
  float inverse_;
  float least_;
};

// The element at `index`, in ascending order, of a warp's 32 * kCount numbers.
template <int kCount>
__device__ inline float WarpElement(const float (&numbers)[kCount], int index) {
  uint32_t keys[kCount];
#pragma unroll
  for (int j = 0; j < kCount; ++j) {
    keys[j] = static_cast<uint32_t>(OrderedBits(numbers[j])) ^ 0x80000000u;
  }
  // The largest number that at most `index` keys are below.
  uint32_t found = 0;
#pragma unroll 1
  for (uint32_t bit = 0x80000000u; bit != 0; bit >>= 1) {
    int below = 0;
#pragma unroll
    for (int j = 0; j < kCount; ++j) below += keys[j] < (found | bit);
    if (__reduce_add_sync(kFullWarp, below) <= index) found |= bit;
  }
  return FromOrderedBits(static_cast<int32_t>(found ^ 0x80000000u));
}

// RadiusOf() of a vector [dim] relative to a centre, computed by one warp. four(i): elements
// [4 i, 4 i + 4) of the vector.
template <typename Four>
__device__ inline float WarpRadius(Four four, const float* centre, int dim) {
  constexpr int kFoursMax = kHeadDimMax / 128;
  const int lane = threadIdx.x % 32;
  float4 x[kFoursMax] = {};
  float largest = 0;
#pragma unroll
  for (int n = 0; n < kFoursMax; ++n) {
    const int at = n * 32 + lane;
    if (4 * at >= dim) continue;
    const float4 v = four(at);
    const float4 c = reinterpret_cast<const float4*>(centre)[at];
    x[n] = make_float4(v.x - c.x, v.y - c.y, v.z - c.z, v.w - c.w);
    largest = fmaxf(fmaxf(fmaxf(largest, fabsf(x[n].x)), fabsf(x[n].y)),
                    fmaxf(fabsf(x[n].z), fabsf(x[n].w)));
  }
  largest = WarpMax(largest);
  const float divisor = Divisor(largest);
  float sum = 0;
#pragma unroll
  for (int n = 0; n < kFoursMax; ++n) {
    const float4 r = make_float4(__fdiv_rn(x[n].x, divisor), __fdiv_rn(x[n].y, divisor),
                                 __fdiv_rn(x[n].z, divisor), __fdiv_rn(x[n].w, divisor));
    const int lanes = min(dim / 4 - n * 32, 32);
    for (int from = 0; from < lanes; ++from) {
      const float a = __shfl_sync(kFullWarp, r.x, from);
      const float b = __shfl_sync(kFullWarp, r.y, from);
      const float c = __shfl_sync(kFullWarp, r.z, from);
      const float d = __shfl_sync(kFullWarp, r.w, from);
      sum = fmaf(d, d, fmaf(c, c, fmaf(b, b, fmaf(a, a, sum))));
    }
  }
  return RadiusOf(largest, sum);
}

// The norm byte of a row in its code page.
__device__ inline uint8_t& NormAt(const CodeTiling& tiling, std::byte* page, int slot) {
  return reinterpret_cast<uint8_t*>(page +
                                    tiling.norm_offset_bytes())[CodeTiling::factor_index(slot)];
}

}  // namespace spillway::cuda
