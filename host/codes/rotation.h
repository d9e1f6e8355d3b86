#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <vector>

namespace spillway {

// Philox4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011). Returns
// the random block for a counter and a key.
std::array<uint32_t, 4> Philox4x32(std::array<uint32_t, 4> counter, std::array<uint32_t, 2> key);

// A random rotation P, [d][d] row-major: orthogonal, determinant +1, uniformly distributed (Haar).
// It depends only on the arguments: Philox normals by Box-Muller, then QR by Householder
// reflections in fp64, rounded to fp32 at the end. Another C library may change the last bit of
// log, sin or cos. So the rotation is computed once on the host and copied to every device.
// Thread-safe. REQUIRES: d >= 1.
std::vector<float> MakeRotation(int d, uint64_t seed, int layer);

// The first `count` standard normals of the same generator, in fp64. Different domains give
// independent numbers for the same seed. Thread-safe.
std::vector<double> Gaussians(size_t count, uint64_t seed, int layer, uint32_t domain);

}  // namespace spillway
