#pragma once

#include <bit>
#include <cmath>
#include <cstdint>

#include "host/base/dtype.h"
#include "host/base/half.h"
#include "host/base/host_device.h"

namespace spillway {

// Rows of 8 bits. A row [K(d) | V(d)] is stored as
//   codes   int8 [2 d]
//   scales  bf16 [2]: of K, of V
//   highs   {uint8 element, int8 high} [Int8HighCount(d)]: first those of V, then those of K
//   zeros   up to a multiple of 64 bytes
// The few elements of K and V that are largest have 16 bits, so that they do not widen the steps of
// all others: models have channels that are 10 to 100 times as large as the rest. With c an
// element's code and h its high part (0 without one), the element is
//   (kInt8HighStep h + c) scale, rounded to the model's dtype.
// The product is exact in fp32, so that all devices read the same row. They also write the same
// one. Thus a row is the same wherever it was written, and two rows can be compared by their bytes.
// Rows begin at multiples of 64 bytes: rows of 304 bytes that begin anywhere cross the link to a
// GPU slower than rows of 512 (docs/results/row-types).

inline constexpr int kInt8CodeMax = 127;
inline constexpr int kInt8HighStep = 254;
// The largest |kInt8HighStep h + c| that an element can have.
inline constexpr int kInt8ElementMax = kInt8HighStep * kInt8CodeMax + kInt8CodeMax - 1;

// Elements with a high part.
inline constexpr int kInt8ValueHighCount = 4;
SPILLWAY_HOST_DEVICE constexpr int Int8KeyHighCount(int head_dim) {
  return head_dim < 32 ? 12 : 26;
}
inline constexpr int kInt8HighCountMax = 30;
SPILLWAY_HOST_DEVICE constexpr int Int8HighCount(int head_dim) {
  return kInt8ValueHighCount + Int8KeyHighCount(head_dim);
}
// Bytes from a row's beginning to its scales, which are followed by the highs.
SPILLWAY_HOST_DEVICE constexpr int Int8ScaleOffset(int head_dim) { return 2 * head_dim; }
SPILLWAY_HOST_DEVICE constexpr int Int8HighOffset(int head_dim) { return 2 * head_dim + 4; }
SPILLWAY_HOST_DEVICE constexpr int Int8RowBytes(int head_dim) {
  return (Int8HighOffset(head_dim) + 2 * Int8HighCount(head_dim) + 63) / 64 * 64;
}
inline constexpr int kInt8RowBytesMax = 576;
static_assert(Int8RowBytes(256) == kInt8RowBytesMax && Int8RowBytes(128) == 320 &&
              Int8RowBytes(64) == 192 && Int8HighOffset(64) + 2 * Int8HighCount(64) == 192);

// Which elements of a vector have a high part: those with the largest numbers, of which no two are
// equal.
SPILLWAY_HOST_DEVICE inline uint32_t Int8Rank(float x, int element) {
  return (std::bit_cast<uint32_t>(x) & 0x7FFFFFFFu) >> 7 << 8 |
         static_cast<uint32_t>(255 - element);
}
SPILLWAY_HOST_DEVICE inline int Int8ElementOf(uint32_t rank) {
  return 255 - static_cast<int>(rank & 255u);
}

// The scale of a vector. rest: the largest magnitude of the elements without a high part; largest:
// of all. It has 7 bits, of which none is lost in bf16, and is 0 or has an inverse.
SPILLWAY_HOST_DEVICE inline float Int8Scale(float rest, float largest) {
  constexpr float kLeast = 0x1p-120f;
  if (largest == 0) return 0;
  const float of_rest = rest / static_cast<float>(kInt8CodeMax);
  const float of_all = largest / static_cast<float>(kInt8ElementMax);
  const uint32_t bits = std::bit_cast<uint32_t>(of_rest > of_all ? of_rest : of_all);
  const float scale = std::bit_cast<float>((bits + 0x1FFFFu) & ~0x1FFFFu);
  return scale > kLeast ? scale : kLeast;
}
SPILLWAY_HOST_DEVICE inline float Int8InverseScale(float scale) {
  return scale == 0 ? 0.0f : 1.0f / scale;
}

SPILLWAY_HOST_DEVICE inline float LargestElement(DType dtype) {
  return dtype == DType::kF32   ? std::bit_cast<float>(0x7F7FFFFFu)
         : dtype == DType::kF16 ? 65504.0f
                                : std::bit_cast<float>(0x7F7F0000u);
}

// kInt8HighStep h + c of an element. It is not rounded to a number beyond those of the dtype.
// inverse: Int8InverseScale().
SPILLWAY_HOST_DEVICE inline int Int8Element(float x, float scale, float inverse,
                                            float largest_element) {
  const float element = ::nearbyintf(x * inverse);
  const float size = ::fabsf(element) * scale;
  const int least = size > largest_element ? 1 : 0;
  return static_cast<int>(element) - (x < 0 ? -least : least);
}
SPILLWAY_HOST_DEVICE inline int Int8High(int element) {
  return (element + (element < 0 ? -kInt8CodeMax : kInt8CodeMax)) / kInt8HighStep;
}

// An element before it is rounded to the dtype.
SPILLWAY_HOST_DEVICE inline float Int8Product(int code, int high, float scale) {
  return static_cast<float>(high * kInt8HighStep + code) * scale;
}

// A finite number as an element of the dtype has it.
SPILLWAY_HOST_DEVICE inline float RoundToDType(DType dtype, float x) {
  if (dtype == DType::kF32) return x;
  if (dtype == DType::kF16) return HalfToFloat(HalfFromFloat(x));
  const uint32_t bits = std::bit_cast<uint32_t>(x);
  return std::bit_cast<float>((bits + 0x7FFFu + (bits >> 16 & 1u)) & 0xFFFF0000u);
}

}  // namespace spillway
