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
  const int64_t row_bytes = int64_t{shape.head_dim} * DTypeBytes(row_dtype);
  const auto rows = [&](int64_t offset) {
    return InCOrder<const std::byte>(data + offset, shape, shape.kv_head_count, row_bytes);
  };
  StepTensors tensors;
  tensors.q_dtype = q_dtype;
  tensors.q = InCOrder<const std::byte>(data, shape, shape.query_head_count,
                                        int64_t{shape.head_dim} * DTypeBytes(q_dtype));
  tensors.k = rows(k_offset);
  tensors.v = rows(v_offset);
  tensors.out_dtype = out_dtype;
  tensors.out = InCOrder(data + out_offset, shape, shape.query_head_count,
                         int64_t{shape.head_dim} * DTypeBytes(out_dtype));
  if (with_lse) tensors.lse = reinterpret_cast<float*>(data + lse_offset);
  return tensors;
}

}  // namespace spillway
