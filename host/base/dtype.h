#pragma once

#include <cstdint>
#include <string_view>

#include "host/base/host_device.h"

namespace spillway {

// Element type of K/V rows and queries, little endian.
enum class DType : uint8_t { kF32, kF16, kBF16 };

SPILLWAY_HOST_DEVICE constexpr int DTypeBytes(DType t) { return t == DType::kF32 ? 4 : 2; }

// "f32", "f16" or "bf16".
constexpr std::string_view DTypeName(DType t) {
  switch (t) {
    case DType::kF32:
      return "f32";
    case DType::kF16:
      return "f16";
    case DType::kBF16:
      return "bf16";
  }
  return "unknown";
}

}  // namespace spillway
