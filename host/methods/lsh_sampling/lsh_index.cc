#include "host/methods/lsh_sampling/lsh_index.h"

#include "host/base/elements.h"
#include "host/base/limits.h"
#include "host/base/parallel.h"
#include "host/methods/lsh_sampling/projections.h"
#include "host/methods/weights/mlp.h"

namespace spillway {

LshIndex::LshIndex(const ModelSpec& spec, const CancelToken* cancel)
    : spec_(spec), projections_(spec.layer_count) {
  ParallelFor(0, spec.layer_count, [&](int layer) {
    if (cancel != nullptr && !cancel->Check().ok()) return;
    projections_[layer] = MakeProjections(spec, layer);
  });
}

int64_t LshIndex::bytes() const {
  size_t count = 0;
  for (const std::vector<float>& of_layer : projections_) count += of_layer.size();
  return static_cast<int64_t>(count * sizeof(float));
}

void LshIndex::Buckets(int layer, const float* x, uint16_t* buckets) const {
  const KeyIndexSpec& indices = spec_.indices;
  std::vector<float> y(static_cast<size_t>(indices.lsh_table_count) * indices.lsh_bits);
  LinearMap(x, spec_.head_dim, projections_[layer].data(), static_cast<int>(y.size()), y.data());
  for (int t = 0; t < indices.lsh_table_count; ++t) {
    uint32_t name = 0;
    for (int b = 0; b < indices.lsh_bits; ++b) {
      name |= static_cast<uint32_t>(y[t * indices.lsh_bits + b] > 0) << b;
    }
    buckets[t] = static_cast<uint16_t>(name);
  }
}

void LshIndex::Encode(const PageKeys& keys, std::byte* section) const {
  const int d = spec_.head_dim;
  std::vector<float> x(d);
  std::vector<uint16_t> buckets(spec_.indices.lsh_table_count);
  for (int t = keys.begin; t < keys.end; ++t) {
    ToFloat(spec_.dtype, keys.rows + t * spec_.row_bytes(), d, x.data());
    for (int i = 0; i < d; ++i) x[i] -= keys.centre[i];
    Buckets(keys.layer, x.data(), buckets.data());
    auto* to = reinterpret_cast<uint16_t*>(section) + t;
    for (size_t i = 0; i < buckets.size(); ++i) to[i * kPageTokenCount] = buckets[i];
  }
}

}  // namespace spillway
