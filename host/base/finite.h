#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>

#include "host/base/dtype.h"

namespace spillway {

// Index of the first element of `data` that is infinite or NaN. data holds
// whole elements of dtype, little endian, at any alignment. Thread-safe.
std::optional<int64_t> FindNonFinite(std::span<const std::byte> data, DType dtype);

}  // namespace spillway
