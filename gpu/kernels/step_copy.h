#pragma once

#include <cuda_runtime_api.h>

#include <array>
#include <cstddef>
#include <cstdint>

// Copies the tensors of a decode step from a caller's memory to shared memory, and back.
namespace spillway::cuda {

// Rows [B, T, H] of `bytes` bytes each. Strides are those of sequences, tokens and heads, in bytes.
struct TensorCopy {
  const std::byte* from = nullptr;
  std::byte* to = nullptr;
  std::array<int64_t, 3> from_strides = {};
  std::array<int64_t, 3> to_strides = {};
  int32_t head_count = 0;
  int32_t bytes = 0;
  int32_t piece = 0;  // filled by the launch: bytes that are moved at a time
};

struct StepCopy {
  static constexpr int kTensorsMax = 3;
  int32_t sequence_count = 0;
  int32_t token_count = 0;
  int32_t tensor_count = 0;
  std::array<TensorCopy, kTensorsMax> tensors;
};

// All tensors are in GPU memory; addresses and strides are multiples of 2 bytes. Does not wait for
// the GPU.
cudaError_t LaunchStepCopy(StepCopy copy, cudaStream_t stream);

}  // namespace spillway::cuda
