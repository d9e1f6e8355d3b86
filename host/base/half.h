#pragma once

#include <bit>
#include <cstdint>

#include "host/base/host_device.h"

namespace spillway {

// Converts a finite fp16 value to fp32, exactly; also subnormal values.
SPILLWAY_HOST_DEVICE inline float HalfToFloat(uint16_t half) {
  // Exponent and mantissa move to their place in fp32; the product corrects the exponent bias.
  const float magnitude = std::bit_cast<float>((half & 0x7FFFu) << 13) * 0x1p112f;
  return std::bit_cast<float>(std::bit_cast<uint32_t>(magnitude) | (half & 0x8000u) << 16);
}

// Converts to the nearest fp16 value, ties to even. Values beyond the largest fp16 number, and NaN,
// become the largest number with the same sign.
SPILLWAY_HOST_DEVICE inline uint16_t HalfFromFloat(float x) {
  constexpr uint32_t kBeyond = 0x477FF000u;  // 65520: would round to infinity
  constexpr uint32_t kNormal = 0x38800000u;  // 2^-14
  constexpr uint32_t kHalf = 0x3F000000u;    // 0.5f: adding it rounds to a multiple of 2^-24
  constexpr uint32_t kRebias = 0xC8000FFFu;  // exponent minus 112, plus almost half a unit
  const uint32_t bits = std::bit_cast<uint32_t>(x);
  const uint32_t sign = bits >> 16 & 0x8000u;
  uint32_t f = bits & 0x7FFFFFFFu;
  if (f >= kBeyond) return static_cast<uint16_t>(sign | 0x7BFFu);
  if (f < kNormal) {
    f = std::bit_cast<uint32_t>(std::bit_cast<float>(f) + 0.5f) - kHalf;
  } else {
    f = (f + kRebias + (f >> 13 & 1u)) >> 13;
  }
  return static_cast<uint16_t>(sign | f);
}

}  // namespace spillway
