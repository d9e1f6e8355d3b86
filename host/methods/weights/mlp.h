#pragma once

#include <cstdint>
#include <vector>

namespace spillway {

// The hash MLPs of one layer, H of them: z = SiLU(x W1 + b1) (+ x), y = z W2
// (+ b2) (+ z), bit j = y_j > 0; the terms with x and z with `residual`. With
// two hidden layers (HashAttention's, github.com/xAlg-ai/HashAttention-1.0)
// y = SiLU(z W2 + b2) W3 + b3. W is indexed [in][out], as Spotlight's released
// weights are.
struct MlpLayer {
  int head_dim = 0;
  int hidden_dim = 0;
  int hash_bits = 0;
  bool residual = false;
  std::vector<float> w1;  // [H, head_dim, hidden_dim]
  std::vector<float> b1;  // [H, hidden_dim]
  std::vector<float> w2;  // [H, hidden_dim, hash_bits]; of two [H, hidden_dim, hidden_dim]
  std::vector<float> b2;  // [H, hash_bits], or empty; of two [H, hidden_dim]
  std::vector<float> w3;  // [H, hidden_dim, hash_bits], of two hidden layers, else empty
  std::vector<float> b3;  // [H, hash_bits], likewise
};

// What the bits of MLP `head`'s code are the signs of: y, [hash_bits], for x
// [head_dim]. Every sum runs over the input index in order, so a machine always
// gives the same bits; instruction sets with and without fma differ where |y|
// is tiny. Thread-safe.
void MlpOutput(const MlpLayer& layer, int head, const float* x, float* y);

// y = x W, W [input_dim][output_dim], each sum one chain of fused multiply-adds
// over the inputs in order. Thread-safe.
void LinearMap(const float* x, int input_dim, const float* w, int output_dim, float* y);

// The code of x: words [hash_bits / 32], bit j of word w is y_{32w+j} > 0.
void MlpCode(const MlpLayer& layer, int head, const float* x, uint32_t* words);

}  // namespace spillway
