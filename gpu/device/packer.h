#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <functional>
#include <vector>

#include "host/model/model_spec.h"
#include "tbb/parallel_for.h"

// Packs a model's data, to upload them in one piece.
namespace spillway::cuda {

// Arrays packed one after the other, 16-byte aligned, and the pointers that are set to them.
class Packer {
 public:
  // Place() sets `place` to the array's address.
  template <typename T>
  void Add(const std::vector<T>& values, const T*& place) {
    if (values.empty()) return;
    const size_t at = bytes_.size();
    bytes_.resize(at + (values.size() * sizeof(T) + 15) / 16 * 16);
    std::memcpy(bytes_.data() + at, values.data(), values.size() * sizeof(T));
    places_.push_back(
        [&place, at](const std::byte* base) { place = reinterpret_cast<const T*>(base + at); });
  }
  const std::vector<std::byte>& bytes() const { return bytes_; }
  void Place(const std::byte* base) const {
    for (const auto& place : places_) place(base);
  }

 private:
  std::vector<std::byte> bytes_;
  std::vector<std::function<void(const std::byte*)>> places_;
};

// Adds make(spec, layer) for all layers.
template <typename Make>
void AddMatrices(const ModelSpec& spec, Make make, std::vector<const float*>& places,
                 Packer& packer) {
  std::vector<std::vector<float>> matrices(spec.layer_count);
  tbb::parallel_for(0, spec.layer_count, [&](int layer) { matrices[layer] = make(spec, layer); });
  places.resize(matrices.size());
  for (size_t l = 0; l < matrices.size(); ++l) packer.Add(matrices[l], places[l]);
}

}  // namespace spillway::cuda
