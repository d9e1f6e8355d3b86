#pragma once

#include <array>
#include <cstdint>
#include <vector>

#include "host/model/model_spec.h"

namespace spillway {

// Philox4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3",
// SC 2011): the random block of a counter under a key.
std::array<uint32_t, 4> Philox4x32(std::array<uint32_t, 4> counter, std::array<uint32_t, 2> key);

// A random rotation P, [d][d] row-major: orthogonal, determinant +1,
// distributed uniformly (Haar). A pure function of its arguments: Philox
// normals by Box-Muller, QR by Householder in fp64, rounded to fp32 at the
// end. Only log, sin and cos of the C library enter, so another library may
// change a last bit now and then; for that reason it is computed once on the
// host and handed to every device. Thread-safe. REQUIRES: d >= 1.
std::vector<float> MakeRotation(int d, uint64_t seed, int layer);

// Gaussian projections of spec.indices' LSH tables, [d][lsh_table_count *
// lsh_bits]: standard normals of the same generator, fp32. Thread-safe.
std::vector<float> MakeProjections(const ModelSpec& spec, int layer);

}  // namespace spillway
