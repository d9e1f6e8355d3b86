#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "absl/status/statusor.h"
#include "host/model/model_spec.h"

namespace spillway {

// The hash MLPs of one layer, H of them (one per KV head or query head, see
// ModelSpec::mlp_count): z = SiLU(x W1 + b1) (+ x), y = z W2 (+ b2) (+ z),
// bit j = y_j > 0; the terms with x and z with `residual`. W is indexed
// [in][out], as Spotlight's released weights are.
struct MlpLayer {
  int head_dim = 0;
  int hidden_dim = 0;
  int hash_bits = 0;
  bool residual = false;
  std::vector<float> w1;  // [H, head_dim, hidden_dim]
  std::vector<float> b1;  // [H, hidden_dim]
  std::vector<float> w2;  // [H, hidden_dim, hash_bits]
  std::vector<float> b2;  // [H, hash_bits], or empty
};

struct MlpWeights {
  std::vector<MlpLayer> layers;
  int64_t bytes() const;
};

// Reads layers.{l}.w1, b1, w2 and, where present, b2 in the shapes above from
// a safetensors file. INVALID_ARGUMENT names the tensor that is missing or
// misshapen, or of which a part of the layers has none (b2). REQUIRES: a
// normalised spec with hash.kind kMlp.
absl::StatusOr<MlpWeights> LoadMlpWeights(const ModelSpec& spec,
                                          std::span<const std::byte> safetensors);

// What the bits of MLP `head`'s code are the signs of: y, [hash_bits], for x
// [head_dim]. Every sum runs over the input index in order, so a machine always
// gives the same bits; instruction sets with and without fma differ where |y|
// is tiny. Thread-safe.
void MlpOutput(const MlpLayer& layer, int head, const float* x, float* y);

// The code of x: words [hash_bits / 32], bit j of word w is y_{32w+j} > 0.
void MlpCode(const MlpLayer& layer, int head, const float* x, uint32_t* words);

}  // namespace spillway
