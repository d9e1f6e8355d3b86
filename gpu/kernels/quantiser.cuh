#pragma once

#include <cmath>

#include "gpu/kernels/page_rows.cuh"
#include "host/core/quantiser.h"

// Quantises rotated keys to codes. Roundings happen at the same points as in the CPU's encoder
// (host/cpu/kernels_encode.cc), so codes are equal bit for bit: sums are chains in index order, and
// only fmaf() fuses products.
namespace spillway::cuda {

// The quantiser of B bits: level = clamp(floor(y scale) + 2^(B-1), 0, 2^B - 1).
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
  // y scale is clamped to [low, high] before the floor is taken. The level stays the same, and the
  // value is small enough for the sum with `shift`.
  float low = 0;   // -2^(B-1)
  float high = 0;  // 2^(B-1) - 1/2
  // 1.5 * 2^23 + 2^(B-1). Floats around it are integers, so a sum rounded down
  // is a floor, and its low bits are the code.
  float shift = 0;
  float middle = 0;  // (2^B - 1) / 2

  // The code is in the low four bits.
  __device__ uint32_t Code(float y) const { return __float_as_uint(Shifted(y)); }
  // The level minus the middle of all levels: t in units of the step.
  __device__ float Centred(float y) const { return (Shifted(y) - kIntegerFloats) - middle; }

  static constexpr float kIntegerFloats = 12582912.0f;  // 1.5 * 2^23

 private:
  __device__ float Shifted(float y) const {
    return __fadd_rd(fminf(fmaxf(y * scale, low), high), shift);
  }
};

// The factor of a key's code in bf16: f = ||k - c|| / <P o, t>, or 0 if one of the two is not
// positive. length: ||k - c||; dot: <P o, t> in units of the step.
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
