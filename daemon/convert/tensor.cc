#include "daemon/convert/tensor.h"

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "daemon/engine/errors.h"
#include "host/base/elements.h"

namespace spillway {
namespace {

std::string ShapeText(const v1::Tensor& tensor) {
  return absl::StrCat("[", absl::StrJoin(tensor.shape(), ", "), "]");
}

template <typename T>
void FillRaw(std::span<const T> values, v1::DType dtype, v1::Tensor& tensor) {
  tensor.set_dtype(dtype);
  tensor.add_shape(static_cast<int64_t>(values.size()));
  tensor.set_data(values.data(), values.size_bytes());
}

}  // namespace

std::optional<DType> FromProto(v1::DType dtype) {
  switch (dtype) {
    case v1::DTYPE_F32:
      return DType::kF32;
    case v1::DTYPE_F16:
      return DType::kF16;
    case v1::DTYPE_BF16:
      return DType::kBF16;
    default:
      return std::nullopt;
  }
}

v1::DType ToProto(DType dtype) {
  switch (dtype) {
    case DType::kF32:
      return v1::DTYPE_F32;
    case DType::kF16:
      return v1::DTYPE_F16;
    case DType::kBF16:
      return v1::DTYPE_BF16;
  }
  return v1::DTYPE_UNSPECIFIED;
}

absl::StatusOr<DType> CheckTensor(const v1::Tensor& tensor, std::initializer_list<int64_t> shape,
                                  const std::string& field) {
  const std::optional<DType> dtype = FromProto(tensor.dtype());
  if (!dtype) {
    return InvalidField(field + ".dtype", absl::StrCat("value ", static_cast<int>(tensor.dtype()),
                                                       " is not DTYPE_F32, F16 or BF16"));
  }
  bool fits = tensor.shape_size() == static_cast<int>(shape.size());
  int axis = 0;
  int64_t bytes = DTypeBytes(*dtype);
  for (const int64_t wanted : shape) {
    if (!fits) break;
    const int64_t size = tensor.shape(axis++);
    fits = wanted == kAnyDim ? size >= 1 : size == wanted;
    if (__builtin_mul_overflow(bytes, size, &bytes)) fits = false;
  }
  if (!fits) {
    const std::string expected = absl::StrJoin(shape, ", ", [](std::string* out, int64_t size) {
      absl::StrAppend(out, size == kAnyDim ? "any" : absl::StrCat(size));
    });
    return InvalidField(field + ".shape",
                        absl::StrCat(ShapeText(tensor), " is not [", expected, "]"));
  }
  if (static_cast<int64_t>(tensor.data().size()) != bytes) {
    return InvalidField(field + ".data", absl::StrCat(tensor.data().size(), " bytes, not the ",
                                                      bytes, " of shape ", ShapeText(tensor)));
  }
  return *dtype;
}

void FillTensor(std::span<const float> values, DType dtype, std::initializer_list<int64_t> shape,
                v1::Tensor& tensor) {
  tensor.set_dtype(ToProto(dtype));
  for (const int64_t size : shape) tensor.add_shape(size);
  std::string& data = *tensor.mutable_data();
  data.resize(values.size() * DTypeBytes(dtype));
  FromFloat(dtype, values.data(), static_cast<int64_t>(values.size()),
            reinterpret_cast<std::byte*>(data.data()));
}

void FillTensor(std::span<const uint32_t> values, v1::Tensor& tensor) {
  FillRaw(values, v1::DTYPE_U32, tensor);
}

void FillTensor(std::span<const uint8_t> values, v1::Tensor& tensor) {
  FillRaw(values, v1::DTYPE_U8, tensor);
}

}  // namespace spillway
