#include "tests/reference/elements.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>
#include <cstring>

namespace spillway::reference {
namespace {

struct Format {
  int mantissa_bits;
  int exponent_min;  // of the smallest normal value
};

Format Of(DType dtype) {
  switch (dtype) {
    case DType::kF32:
      return {23, -126};
    case DType::kF16:
      return {10, -14};
    case DType::kBF16:
      return {7, -126};
  }
  return {};
}

uint16_t HalfBits(double x) {
  const uint16_t sign = std::signbit(x) ? 0x8000 : 0;
  const double a = std::fabs(x);
  if (a < 0x1p-14) return sign | static_cast<uint16_t>(a * 0x1p24);
  const int e = std::ilogb(a);
  return sign | static_cast<uint16_t>((e + 15) << 10) |
         static_cast<uint16_t>((std::ldexp(a, -e) - 1) * 1024);
}

}  // namespace

double Round(DType dtype, double x) {
  if (x == 0) return x;
  const Format f = Of(dtype);
  const double quantum = std::ldexp(1, std::max(std::ilogb(x), f.exponent_min) - f.mantissa_bits);
  return std::nearbyint(x / quantum) * quantum;
}

std::vector<std::byte> Bytes(DType dtype, std::span<const float> rounded) {
  std::vector<std::byte> bytes(rounded.size() * DTypeBytes(dtype));
  for (size_t i = 0; i < rounded.size(); ++i) {
    if (dtype == DType::kF32) {
      std::memcpy(&bytes[4 * i], &rounded[i], 4);
      continue;
    }
    const uint16_t bits = dtype == DType::kF16
                              ? HalfBits(rounded[i])
                              : static_cast<uint16_t>(std::bit_cast<uint32_t>(rounded[i]) >> 16);
    std::memcpy(&bytes[2 * i], &bits, 2);
  }
  return bytes;
}

}  // namespace spillway::reference
