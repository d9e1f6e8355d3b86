#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>

#include "gpu/kernels/encode.h"
#include "gpu/kernels/step.h"

// What a step on a caller's stream appends: its K and V lie in GPU memory.
namespace spillway::cuda {

// Where a new row goes.
struct RowTarget {
  std::byte* row = nullptr;       // pinned
  std::byte* resident = nullptr;  // device, may be null
  std::byte* recent = nullptr;    // the same
  std::byte* whole = nullptr;     // the same
};

struct TensorAppend {
  DType dtype = DType::kBF16;
  int32_t head_dim = 0;
  int32_t item_count = 0;              // B
  int32_t kv_head_count = 0;           // H
  CallerTensor<const std::byte> k;     // [B, T, H, d], 16-byte aligned rows
  CallerTensor<const std::byte> v;     // the same
  const RowTarget* targets = nullptr;  // [B][T][H]
  BadElement* bad = nullptr;           // [B], the same as the check's
  CallerTensors step;                  // q is looked at
};

// The pages that an item's new rows close, at most one a head.
struct StepEncode {
  EncodeWork work;  // nothing unless begin < end
  HeadIndex heads;
};

// The committed length of one (sequence, layer), for who comes after the process.
struct StepLength {
  unsigned long long* word = nullptr;  // pinned; null: nothing outlives the process
  unsigned long long before = 0;
  unsigned long long after = 0;
};

// Launchers; nothing waits. Copies new rows [K | V] to where they go. The first
// element of k, v or q that is not finite goes to `bad`, and what stands beside it
// is written as 0. Does nothing for an announcement that is not the launch's.
cudaError_t LaunchTensorAppend(const TensorAppend& append, cudaStream_t stream);
// Codes of the pages that are closed, [item_count] in device memory. May begin
// while the launch before it runs if `overlap`.
cudaError_t LaunchStepEncode(const StepEncode* encodes, int item_count, const EncodeWork& shape,
                             const RotationWeights& weights, bool overlap, cudaStream_t stream);

// Writes the lengths of items whose rows the launch before has written, [item_count] in device
// memory: not of one with a bad element, nor where a step before has failed, whose length is not
// `before`. Who sees a length sees its rows.
cudaError_t LaunchStepLengths(const StepLength* lengths, int item_count, const StepCheck& check,
                              cudaStream_t stream);

}  // namespace spillway::cuda
