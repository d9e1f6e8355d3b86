// Tensors of the API: bytes with a dtype and a shape, in C order, little endian.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string_view>

#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "spillway/v1/tensor.pb.h"

namespace spillway {

// Bytes of one element; 0 for a dtype that is not in the API.
size_t DTypeBytes(v1::DType dtype);

// A tensor that holds a copy of `data`.
// REQUIRES: data.size() == product(shape) * DTypeBytes(dtype).
v1::Tensor MakeTensor(v1::DType dtype, absl::Span<const int64_t> shape, std::string_view data);

// A DTYPE_F32 tensor that holds a copy of `values`.
// REQUIRES: values.size() == product(shape).
v1::Tensor MakeTensor(absl::Span<const int64_t> shape, absl::Span<const float> values);

// The elements of a DTYPE_F32 tensor, without a copy. Valid until the tensor is changed
// or destroyed. INVALID_ARGUMENT if the dtype differs, or the size does not match the
// shape.
absl::StatusOr<absl::Span<const float>> FloatValues(const v1::Tensor& tensor);

}  // namespace spillway
