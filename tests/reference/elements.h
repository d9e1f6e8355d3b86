#pragma once

#include <cstddef>
#include <span>
#include <vector>

#include "host/model/model_spec.h"

namespace spillway::reference {

// x rounded to the nearest value of the type, ties to even. x must be finite and within the type's
// range.
double Round(DType dtype, double x);

// The little-endian bytes of values that Round() returned.
std::vector<std::byte> Bytes(DType dtype, std::span<const float> rounded);

}  // namespace spillway::reference
