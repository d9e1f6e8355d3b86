#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <vector>

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

// The first `count` standard normals of the same generator under a seed, fp64.
// Domains keep uses of one seed apart. Thread-safe.
std::vector<double> Gaussians(size_t count, uint64_t seed, int layer, uint32_t domain);

}  // namespace spillway
