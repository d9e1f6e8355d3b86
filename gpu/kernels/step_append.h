#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>

#include "gpu/kernels/encode.h"
#include "gpu/kernels/step.h"

// The append of a step on a caller's stream: K and V are in GPU memory.
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
  RowType row_type = RowType::kElements;
  int32_t head_dim = 0;
  int32_t item_count = 0;              // B
  int32_t kv_head_count = 0;           // H
  StepPlace<const std::byte> k;        // [B, T, H, d], 16-byte aligned rows
  StepPlace<const std::byte> v;        // the same
  const RowTarget* targets = nullptr;  // [B][T][H]
  BadElement* bad = nullptr;           // [B]; the same array as step.check.bad
  CallerTensors step;                  // its q is checked
  uint32_t* clear = nullptr;           // [clear_count] words that become kNoToken
  int32_t clear_count = 0;
};

// The pages that an item's new rows fill, at most one per KV head.
struct StepEncode {
  EncodeWork work;  // no page unless begin < end
  HeadIndex heads;
};

// The committed length of one (sequence, layer), in the record that outlives the process.
struct StepLength {
  unsigned long long* word = nullptr;  // pinned; null: nothing outlives the process
  unsigned long long before = 0;
  unsigned long long after = 0;
};

// Launchers; they do not wait for the GPU. LaunchTensorAppend() copies new rows [K | V] to their
// targets. The first element of k, v or q that is not finite goes to `bad`, and in rows the 16
// bytes with it become 0. Does nothing if the version is not that of the announcement.
cudaError_t LaunchTensorAppend(const TensorAppend& append, cudaStream_t stream);
// Encodes the pages that the new rows fill; encodes [item_count] is in device memory. With
// `overlap`, the kernel may begin while the previous one still runs.
cudaError_t LaunchStepEncode(const StepEncode* encodes, int item_count, const EncodeWork& shape,
                             const RotationWeights& weights, bool overlap, cudaStream_t stream);

// Writes the lengths of the items whose rows the previous launch has written; lengths [item_count]
// is in device memory. Skips items with a bad element, and items for which an earlier step failed:
// their length is not `before`. A reader that sees a length also sees its rows.
cudaError_t LaunchStepLengths(const StepLength* lengths, int item_count, const StepCheck& check,
                              cudaStream_t stream);

}  // namespace spillway::cuda
