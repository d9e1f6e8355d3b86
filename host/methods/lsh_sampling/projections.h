#pragma once

#include <cstdint>
#include <vector>

#include "host/model/model_spec.h"

namespace spillway {

// The Gaussian projections of one layer's LSH tables, [d][lsh_table_count * lsh_bits]: standard
// normals (Gaussians()) in fp32. Thread-safe.
std::vector<float> MakeProjections(const ModelSpec& spec, int layer);
// Bytes of the projections of all layers.
int64_t ProjectionBytes(const ModelSpec& spec);

}  // namespace spillway
