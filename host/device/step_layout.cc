#include "host/device/step_layout.h"

namespace spillway {
namespace {

constexpr int64_t kStepAlignment = 64;

int64_t AlignedOffset(int64_t bytes) {
  return (bytes + kStepAlignment - 1) / kStepAlignment * kStepAlignment;
}

}  // namespace

// Sizes that the API allows cannot overflow.
StepLayout::StepLayout(const StepShape& shape, DType q_dtype, DType row_dtype, DType out_dtype)
    : shape(shape), q_dtype(q_dtype), row_dtype(row_dtype), out_dtype(out_dtype) {
  const int64_t tokens = int64_t{shape.sequence_count} * shape.token_count;
  const int64_t q_elements = tokens * shape.query_head_count * shape.head_dim;
  const int64_t row_bytes = tokens * shape.kv_head_count * shape.head_dim * DTypeBytes(row_dtype);
  k_offset = AlignedOffset(q_elements * DTypeBytes(q_dtype));
  v_offset = k_offset + AlignedOffset(row_bytes);
  out_offset = v_offset + AlignedOffset(row_bytes);
  lse_offset = out_offset + AlignedOffset(q_elements * DTypeBytes(out_dtype));
  byte_count = lse_offset + tokens * shape.query_head_count * int64_t{sizeof(float)};
}

StepTensors StepLayout::At(std::byte* data, bool with_lse) const {
  const StepData begins = {data, data + k_offset, data + v_offset, data + out_offset,
                           with_lse ? reinterpret_cast<float*>(data + lse_offset) : nullptr};
  return InCOrder(begins, shape, q_dtype, row_dtype, out_dtype);
}

StepTensors InCOrder(const StepData& data, const StepShape& shape, DType q_dtype, DType row_dtype,
                     DType out_dtype) {
  const auto place = [&shape](auto* begin, int64_t head_count, DType dtype) {
    return InCOrder(begin, shape, head_count, int64_t{shape.head_dim} * DTypeBytes(dtype));
  };
  StepTensors tensors;
  tensors.q_dtype = q_dtype;
  tensors.q = place(data.q, shape.query_head_count, q_dtype);
  tensors.k = place(data.k, shape.kv_head_count, row_dtype);
  tensors.v = place(data.v, shape.kv_head_count, row_dtype);
  tensors.out_dtype = out_dtype;
  tensors.out = place(data.out, shape.query_head_count, out_dtype);
  tensors.lse = data.lse;
  return tensors;
}

}  // namespace spillway
