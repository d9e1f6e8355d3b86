#include "spillway/tensor.h"

#include <cassert>
#include <functional>
#include <numeric>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"

namespace spillway {
namespace {

template <typename Shape>
int64_t ElementCount(const Shape& shape) {
  return std::accumulate(shape.begin(), shape.end(), int64_t{1}, std::multiplies<>());
}

}  // namespace

size_t DTypeBytes(v1::DType dtype) {
  switch (dtype) {
    case v1::DTYPE_F32:
    case v1::DTYPE_U32:
      return 4;
    case v1::DTYPE_F16:
    case v1::DTYPE_BF16:
      return 2;
    case v1::DTYPE_U8:
      return 1;
    default:
      return 0;
  }
}

v1::Tensor MakeTensor(v1::DType dtype, absl::Span<const int64_t> shape, std::string_view data) {
  assert(data.size() == ElementCount(shape) * DTypeBytes(dtype));
  v1::Tensor tensor;
  tensor.set_dtype(dtype);
  tensor.mutable_shape()->Add(shape.begin(), shape.end());
  tensor.set_data(data.data(), data.size());
  return tensor;
}

v1::Tensor MakeTensor(absl::Span<const int64_t> shape, absl::Span<const float> values) {
  return MakeTensor(v1::DTYPE_F32, shape,
                    {reinterpret_cast<const char*>(values.data()), values.size() * sizeof(float)});
}

absl::StatusOr<absl::Span<const float>> FloatValues(const v1::Tensor& tensor) {
  if (tensor.dtype() != v1::DTYPE_F32) {
    return absl::InvalidArgumentError(
        absl::StrCat("the tensor is ", v1::DType_Name(tensor.dtype()), ", not DTYPE_F32"));
  }
  const auto count = static_cast<size_t>(ElementCount(tensor.shape()));
  if (tensor.data().size() != count * sizeof(float)) {
    return absl::InvalidArgumentError(
        absl::StrCat("a tensor of shape [", absl::StrJoin(tensor.shape(), ", "), "] has ",
                     tensor.data().size(), " bytes, not ", count * sizeof(float)));
  }
  return absl::MakeConstSpan(reinterpret_cast<const float*>(tensor.data().data()), count);
}

}  // namespace spillway
