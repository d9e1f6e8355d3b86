// Shape of a decode step's tensors, and how they lie in memory that is allocated for them.
#pragma once

#include <cstddef>
#include <cstdint>

#include "host/base/dtype.h"
#include "host/device/step_tensors.h"

namespace spillway {

// A client and its daemon exchange it in shared memory. row_dtype: a number of v1::DType.
struct StepShape {
  int32_t sequence_count;
  int32_t token_count;
  int32_t query_head_count;
  int32_t kv_head_count;
  int32_t head_dim;
  uint32_t row_dtype;
};

// Where each tensor of a layer begins.
struct StepData {
  const std::byte* q;
  const std::byte* k;
  const std::byte* v;
  std::byte* out;
  float* lse;  // may be null
};
// The tensors of a layer, each in C order.
StepTensors InCOrder(const StepData& data, const StepShape& shape, DType q_dtype, DType row_dtype,
                     DType out_dtype);

// Layout of a layer's tensors in one block of memory: q, k, v, out and lse one after the other,
// each in C order and aligned to 64 bytes.
struct StepLayout {
  StepLayout(const StepShape& shape, DType q_dtype, DType row_dtype, DType out_dtype);

  // The tensors in memory that begins at `data`. Strides are those of C order.
  StepTensors At(std::byte* data, bool with_lse) const;

  const StepShape shape;
  const DType q_dtype, row_dtype, out_dtype;
  int64_t k_offset, v_offset, out_offset, lse_offset;
  int64_t byte_count;
};

// The layout for which memory is allocated: queries and outputs in float32 take the most.
inline StepLayout LargestLayout(const StepShape& shape, DType row_dtype) {
  return StepLayout(shape, DType::kF32, row_dtype, DType::kF32);
}

// A tensor [B, T, H, d] of a step in C order. bytes: of one head's elements.
template <typename Byte>
StepPlace<Byte> InCOrder(Byte* data, const StepShape& shape, int64_t head_count, int64_t bytes) {
  return {data, shape.token_count * head_count * bytes, head_count * bytes, bytes};
}

// Shape of a step's tensor with head_count heads.
inline StepRows RowsOf(const StepShape& shape, int64_t head_count, DType dtype) {
  return {shape.sequence_count, shape.token_count, head_count,
          int64_t{shape.head_dim} * DTypeBytes(dtype)};
}

}  // namespace spillway
