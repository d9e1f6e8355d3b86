#pragma once

#include <cstddef>
#include <cstdint>

#include "host/base/dtype.h"

namespace spillway {

// Name of the SIMD instruction set in use, for example "AVX3_DL".
const char* SimdTargetName();
// Whether the processor has what every SIMD kernel needs (AVX2 and FMA on x86).
bool SimdSupported();

// fp32 of `count` elements, and back, round to nearest even. in and out do not
// overlap; any alignment. Thread-safe.
void ToFloat(DType dtype, const std::byte* in, int64_t count, float* out);
void FromFloat(DType dtype, const float* in, int64_t count, std::byte* out);

}  // namespace spillway
