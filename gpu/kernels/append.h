#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>

#include "gpu/kernels/code_tiling.h"

// What an append of few tokens brings to the GPU: their codes, the rows that it
// holds, and the addresses of new pages. All lists lie in pinned memory.
namespace spillway::cuda {

struct TableUpdate {
  uint64_t* slot = nullptr;  // device
  uint64_t value = 0;
};

struct RowCopy {
  const std::byte* from = nullptr;  // pinned
  std::byte* to = nullptr;          // device
};

// One token of one KV head, to be encoded.
struct AppendedKey {
  const std::byte* row = nullptr;     // [K | V], on the GPU or pinned
  std::byte* code_page = nullptr;     // device, of the token's page
  const float* centre = nullptr;      // device, [d]
  const float* transposed = nullptr;  // device, P^T [d][d]
  int64_t slot = 0;                   // of the token in its page
};

struct AppendCounts {
  int64_t update_count = 0;
  int64_t copy_count = 0;  // some two a key, or less
};

// The appends of a step. What it launches depends on nothing else, so that it
// can be part of a graph: how many updates and copies there are lies in memory.
struct StepAppend {
  DType dtype = DType::kBF16;
  int head_dim = 0;  // d, a multiple of 16 in [16, 256]
  int64_t row_bytes = 0;
  CodeTiling tiling;
  int bits_per_dim = 0;  // B in [1, 4]
  const AppendedKey* keys = nullptr;
  int key_count = 0;
  const TableUpdate* updates = nullptr;
  const RowCopy* copies = nullptr;
  const AppendCounts* counts = nullptr;

  bool operator==(const StepAppend&) const = default;
};

// Launchers; nothing waits. Codes and factors are bit-equal to the CPU
// device's. Nothing if there is no key.
cudaError_t LaunchStepAppend(const StepAppend& append, cudaStream_t stream);
// *slot = value.
cudaError_t LaunchTableUpdates(const TableUpdate* updates, int64_t count, cudaStream_t stream);
cudaError_t LaunchRowCopies(const RowCopy* copies, int64_t count, int64_t row_bytes,
                            cudaStream_t stream);

}  // namespace spillway::cuda
