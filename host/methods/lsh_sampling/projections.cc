#include "host/methods/lsh_sampling/projections.h"

#include "host/codes/rotation.h"

namespace spillway {

std::vector<float> MakeProjections(const ModelSpec& spec, int layer) {
  constexpr uint32_t kProjectionDomain = 0x70726f6a;  // "proj"
  const KeyIndexSpec& indices = spec.indices;
  const size_t count =
      static_cast<size_t>(spec.head_dim) * indices.lsh_table_count * indices.lsh_bits;
  const std::vector<double> g =
      Gaussians(count, indices.lsh_seed, spec.first_layer + layer, kProjectionDomain);
  return {g.begin(), g.end()};
}

int64_t ProjectionBytes(const ModelSpec& spec) {
  return int64_t{spec.layer_count} * spec.indices.lsh_table_count * spec.indices.lsh_bits *
         spec.head_dim * static_cast<int64_t>(sizeof(float));
}

}  // namespace spillway
