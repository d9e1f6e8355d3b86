// Tensors of the API and the engine's bytes.
#pragma once

#include <cstdint>
#include <initializer_list>
#include <optional>
#include <span>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "host/model/model_spec.h"
#include "spillway/v1/tensor.pb.h"

namespace spillway {

// A dimension that a tensor must have, or kAnyDim: at least 1.
inline constexpr int64_t kAnyDim = -1;

std::optional<DType> FromProto(v1::DType dtype);
v1::DType ToProto(DType dtype);

// Checks an F32, F16 or BF16 tensor: rank, dimensions, and that its bytes are
// exactly what dtype and shape say. INVALID_ARGUMENT names `field` and what in
// it is wrong. Returns the element type.
absl::StatusOr<DType> CheckTensor(const v1::Tensor& tensor, std::initializer_list<int64_t> shape,
                                  const std::string& field);

inline const std::byte* BytesOf(const v1::Tensor& tensor) {
  return reinterpret_cast<const std::byte*>(tensor.data().data());
}

// A tensor of values, rounded to nearest even where dtype is narrower.
void FillTensor(std::span<const float> values, DType dtype, std::initializer_list<int64_t> shape,
                v1::Tensor& tensor);
// One-dimensional tensors of raw elements.
void FillTensor(std::span<const uint32_t> values, v1::Tensor& tensor);
void FillTensor(std::span<const uint8_t> values, v1::Tensor& tensor);

}  // namespace spillway
