#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "gpu/kernels/encode.h"

namespace spillway::cuda {

// The H MLPs of one layer; see host/methods/weights/mlp.h.
struct MlpWeightsView {
  int hidden_dim = 0;
  int hash_bits = 0;
  bool residual = false;
  const float* w1 = nullptr;  // [H][d][hidden]
  const float* b1 = nullptr;  // [H][hidden]
  const float* w2 = nullptr;  // [H][hidden][bits]; with two hidden layers [H][hidden][hidden]
  const float* b2 = nullptr;  // [H][bits], may be null; with two [H][hidden]
  const float* w3 = nullptr;  // [H][hidden][bits] with two hidden layers, else null
  const float* b3 = nullptr;  // [H][bits], likewise
};

// Launchers; they do not wait. A key's plane of C * hash_bits bits holds C codes; code c of the
// keys of KV head h is computed by MLP h * C + c.
cudaError_t LaunchEncodeMlp(const EncodeWork& work, const MlpWeightsView& weights,
                            cudaStream_t stream);
// Computes the codes bits [count][hash_bits / 32] of vectors x [count][d], `group` vectors per MLP.
cudaError_t LaunchMlpCodes(const MlpWeightsView& weights, int head_dim, int group, const float* x,
                           int count, uint32_t* bits, cudaStream_t stream);

}  // namespace spillway::cuda
