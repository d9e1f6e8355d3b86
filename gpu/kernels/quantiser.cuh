#pragma once

#include <cmath>

#include "gpu/kernels/page_rows.cuh"
#include "host/core/quantiser.h"

// How rotated keys become codes. Every rounding happens where the CPU's encoder
// has it (host/cpu/kernels_encode.cc), so that codes are equal bit for bit: sums
// are chains in index order, products are fused by fmaf() alone.
namespace spillway::cuda {

// The quantiser of B bits, a level being clamp(floor(y scale) + 2^(B-1), 0,
// 2^B - 1).
struct Quantiser {
  static Quantiser Of(int head_dim, int bits) {
    const float half = static_cast<float>(1 << (bits - 1));
    Quantiser q;
    q.step = QuantiserStep(bits);
    q.scale = std::sqrt(static_cast<float>(head_dim)) / q.step;
    q.low = -half;
    q.high = half - 0.5f;
    q.shift = kIntegerFloats + half;
    q.middle = half - 0.5f;
    return q;
  }

  float step = 0;
  float scale = 0;  // sqrt(d) / step
  // y scale is clamped to [low, high] before its floor is taken: the same
  // level, and small enough for the sum below.
  float low = 0;   // -2^(B-1)
  float high = 0;  // 2^(B-1) - 1/2
  // 1.5 * 2^23 + 2^(B-1). Floats around it are integers, so a sum rounded down
  // is a floor, and its low bits are the code.
  float shift = 0;
  float middle = 0;  // (2^B - 1) / 2

  // The code is in the low four bits.
  __device__ uint32_t Code(float y) const { return __float_as_uint(Shifted(y)); }
  // Level less the middle: t in units of the step.
  __device__ float Centred(float y) const { return (Shifted(y) - kIntegerFloats) - middle; }

  static constexpr float kIntegerFloats = 12582912.0f;  // 1.5 * 2^23

 private:
  __device__ float Shifted(float y) const {
    return __fadd_rd(fminf(fmaxf(y * scale, low), high), shift);
  }
};

// The bf16 of f = ||k - c|| / <P o, t>, 0 where either vanishes; dot is in
// units of the step.
__device__ inline uint16_t Factor(float length, float dot, float step) {
  if (!(length > 0) || !(dot > 0)) return 0;
  return FloatToBFloat16(fminf(__fdiv_rn(length, dot * step), 3.0e38f));
}
__device__ inline void StoreFactor(const CodeTiling& tiling, std::byte* code_page, int slot,
                                   uint16_t factor) {
  std::byte* factors = code_page + tiling.factor_offset_bytes();
  reinterpret_cast<uint16_t*>(factors)[CodeTiling::factor_index(slot)] = factor;
}

}  // namespace spillway::cuda
