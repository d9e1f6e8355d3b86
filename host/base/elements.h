#pragma once

#include <cstddef>
#include <cstdint>

#include "host/base/dtype.h"

namespace spillway {

// Name of the SIMD instruction set in use, for example "AVX3_DL".
const char* SimdTargetName();
// Whether the processor has the instructions that every SIMD kernel needs (AVX2 and FMA on x86).
bool SimdSupported();

// Convert `count` elements to fp32 and back, rounding to nearest even. in and out must not overlap
// and may have any alignment. Thread-safe.
void ToFloat(DType dtype, const std::byte* in, int64_t count, float* out);
void FromFloat(DType dtype, const float* in, int64_t count, std::byte* out);

}  // namespace spillway
