#pragma once

#include <cstdint>
#include <vector>

namespace spillway {

// The H hash MLPs of one layer: z = SiLU(x W1 + b1) (+ x), y = z W2 (+ b2) (+ z), and bit j of the
// code is y_j > 0. The terms + x and + z exist only if `residual`. With two hidden layers (as in
// HashAttention, github.com/xAlg-ai/HashAttention-1.0): y = SiLU(z W2 + b2) W3 + b3. W is indexed
// [in][out], as in Spotlight's released weights.
struct MlpLayer {
  int head_dim = 0;
  int hidden_dim = 0;
  int hash_bits = 0;
  bool residual = false;
  std::vector<float> w1;  // [H, head_dim, hidden_dim]
  std::vector<float> b1;  // [H, hidden_dim]
  std::vector<float> w2;  // [H, hidden_dim, hash_bits]; two layers: [H, hidden_dim, hidden_dim]
  std::vector<float> b2;  // [H, hash_bits] or empty; two layers: [H, hidden_dim]
  std::vector<float> w3;  // two layers: [H, hidden_dim, hash_bits]; else empty
  std::vector<float> b3;  // two layers: [H, hash_bits]; else empty
};

// Computes y [hash_bits] of MLP `head` for x [head_dim]; the bits of the code are the signs of y.
// Every sum runs over the input index in order, so a machine always gives the same bits.
// Instruction sets with and without fma may give other bits where |y| is tiny. Thread-safe.
void MlpOutput(const MlpLayer& layer, int head, const float* x, float* y);

// y = x W, with W [input_dim][output_dim]. Each sum is one chain of fused multiply-adds over the
// inputs, in order. Thread-safe.
void LinearMap(const float* x, int input_dim, const float* w, int output_dim, float* y);

// Computes the code of x: words [hash_bits / 32]. Bit j of word w is y_{32w+j} > 0. Thread-safe.
void MlpCode(const MlpLayer& layer, int head, const float* x, uint32_t* words);

}  // namespace spillway
