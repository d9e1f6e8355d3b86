#include "services/convert/tensor.h"

#include <algorithm>
#include <cstring>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "engine/errors.h"
#include "host/base/elements.h"
#include "host/base/status_macros.h"
#include "services/convert/names.h"

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

// The dtype, and the bytes of the whole tensor.
struct Checked {
  DType dtype = DType::kF32;
  int64_t bytes = 0;
};

absl::StatusOr<Checked> CheckShape(const v1::Tensor& tensor, std::initializer_list<int64_t> shape,
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
  return Checked{*dtype, bytes};
}

absl::Status CheckData(const v1::Tensor& tensor, int64_t bytes, const std::string& field) {
  if (static_cast<int64_t>(tensor.data().size()) == bytes) return absl::OkStatus();
  return InvalidField(field + ".data", absl::StrCat(tensor.data().size(), " bytes, not the ", bytes,
                                                    " of shape ", ShapeText(tensor)));
}

absl::StatusOr<std::shared_ptr<const Region>> RegionOf(const v1::RegionSlice& slice,
                                                       const CallerRegions& regions,
                                                       const std::string& field,
                                                       TensorMemory memory) {
  const absl::StatusOr<std::string> id = ParseName(slice.region(), "regions", field + ".region");
  if (!id.ok()) return id.status();
  ASSIGN_OR_RETURN(const std::shared_ptr<const Region> region, regions.Find(*id));
  if (!region->on_gpu || region->gpu_memory != nullptr || memory == TensorMemory::kAny) {
    return region;
  }
  return InvalidField(field + ".region",
                      absl::StrCat("regions/", region->id,
                                   " is only for rows that Append reads or FetchPages writes"));
}

absl::Status CheckStrides(const v1::RegionSlice& slice, std::span<const int64_t> shape,
                          int64_t element_bytes, const std::string& field) {
  const auto wrong = [&](const std::string& what) {
    return InvalidField(field + ".strides", what);
  };
  if (slice.strides_size() != static_cast<int>(shape.size())) {
    return wrong(absl::StrCat(slice.strides_size(), " values for ", shape.size(), " dimensions"));
  }
  for (const int64_t stride : slice.strides()) {
    if (stride < 0 || stride % element_bytes != 0) {
      return wrong(absl::StrCat("value ", stride, " is not a multiple of the element's ",
                                element_bytes, " bytes, 0 or more"));
    }
  }
  if (const int64_t last = slice.strides(slice.strides_size() - 1); last != element_bytes) {
    return wrong(absl::StrCat("value ", last, " of the last dimension is not ", element_bytes,
                              ": rows lie side by side"));
  }
  return absl::OkStatus();
}

// Bytes from the start of the first element to the end of the last one.
absl::StatusOr<int64_t> Reach(std::span<const int64_t> shape, std::span<const int64_t> strides,
                              int64_t element_bytes, const std::string& field) {
  if (std::find(shape.begin(), shape.end(), 0) != shape.end()) return 0;
  int64_t reach = element_bytes;
  for (size_t axis = 0; axis < shape.size(); ++axis) {
    int64_t step = 0;
    if (__builtin_mul_overflow(shape[axis] - 1, strides[axis], &step) ||
        __builtin_add_overflow(reach, step, &reach)) {
      return InvalidField(field + ".strides", "the tensor would be larger than any memory");
    }
  }
  return reach;
}

absl::Status CheckWithin(const v1::RegionSlice& slice, const Region& region, int64_t bytes,
                         int64_t element_bytes, const std::string& field) {
  const auto size = static_cast<int64_t>(region.bytes.size());
  const int64_t offset = slice.offset();
  if (offset < 0 || offset % element_bytes != 0) {
    return InvalidField(field + ".offset",
                        absl::StrCat("value ", offset, " is not a multiple of the element's ",
                                     element_bytes, " bytes, 0 or more"));
  }
  // By subtraction: the sum may overflow.
  if (bytes > size || offset > size - bytes) {
    return InvalidField(field + ".offset",
                        absl::StrCat(bytes, " bytes from ", offset, " on are not in the ", size,
                                     " of regions/", region.id));
  }
  return absl::OkStatus();
}

// Strides of C order. False if the tensor would be larger than any memory.
bool DenseStrides(std::span<const int64_t> shape, int64_t element_bytes,
                  std::array<int64_t, 4>& strides) {
  int64_t stride = element_bytes;
  for (size_t axis = shape.size(); axis-- > 0;) {
    strides[axis] = stride;
    if (__builtin_mul_overflow(stride, shape[axis], &stride)) return false;
  }
  return true;
}

}  // namespace

absl::StatusOr<TensorTarget> TargetOf(const v1::RegionSlice& slice, std::span<const int64_t> shape,
                                      DType dtype, const CallerRegions& regions,
                                      const std::string& field, TensorMemory memory) {
  const int64_t element_bytes = DTypeBytes(dtype);
  TensorTarget target;
  if (slice.strides_size() != 0) {
    RETURN_IF_ERROR(CheckStrides(slice, shape, element_bytes, field));
    std::copy(slice.strides().begin(), slice.strides().end(), target.strides.begin());
  } else if (!DenseStrides(shape, element_bytes, target.strides)) {
    return InvalidField(field, absl::StrCat("a tensor [", absl::StrJoin(shape, ", "),
                                            "] would be larger than any memory"));
  }
  ASSIGN_OR_RETURN(target.region, RegionOf(slice, regions, field, memory));
  const std::span<const int64_t> strides(target.strides.data(), shape.size());
  ASSIGN_OR_RETURN(const int64_t reach, Reach(shape, strides, element_bytes, field));
  RETURN_IF_ERROR(CheckWithin(slice, *target.region, reach, element_bytes, field));
  target.data = target.region->bytes.data() + slice.offset();
  return target;
}

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

absl::StatusOr<TensorView> ViewTensor(const v1::Tensor& tensor,
                                      std::initializer_list<int64_t> shape,
                                      const CallerRegions& regions, const std::string& field,
                                      TensorMemory memory) {
  const absl::StatusOr<Checked> checked = CheckShape(tensor, shape, field);
  if (!checked.ok()) return checked.status();
  TensorView view;
  view.dtype = checked->dtype;
  const std::span<const int64_t> sizes(tensor.shape().data(), shape.size());
  if (tensor.has_slice()) {
    ASSIGN_OR_RETURN(const TensorTarget place,
                     TargetOf(tensor.slice(), sizes, view.dtype, regions, field, memory));
    view.data = place.data;
    view.strides = place.strides;
    view.region = place.region;
    return view;
  }
  RETURN_IF_ERROR(CheckData(tensor, checked->bytes, field));
  // Cannot overflow: the bytes are in the message.
  DenseStrides(sizes, DTypeBytes(view.dtype), view.strides);
  view.data = BytesOf(tensor);
  return view;
}

absl::StatusOr<std::shared_ptr<const std::byte[]>> CopyOf(const TensorView& view,
                                                          std::span<const int64_t> shape) {
  int64_t rows = 1;
  for (size_t axis = 0; axis + 1 < shape.size(); ++axis) rows *= shape[axis];
  const int64_t row_bytes = shape.back() * DTypeBytes(view.dtype);
  std::shared_ptr<std::byte[]> copy(new std::byte[static_cast<size_t>(rows * row_bytes)]);
  SharedDeviceMemory* const gpu = view.region == nullptr ? nullptr : view.region->gpu_memory.get();
  // Rows that one copy takes from a GPU: those of the second to last dimension, and those of the
  // dimensions before it whose strides continue its spacing.
  int64_t together = 1;
  int64_t stride = row_bytes;
  for (size_t axis = shape.size() - 1; gpu != nullptr && axis-- > 0;) {
    if (axis + 2 == shape.size()) stride = view.strides[axis];
    if (view.strides[axis] != together * stride) break;
    together *= shape[axis];
  }
  for (int64_t row = 0; row < rows; row += together) {
    const std::byte* from = view.data;
    int64_t rest = row;
    for (size_t axis = shape.size() - 1; axis-- > 0; rest /= shape[axis]) {
      from += rest % shape[axis] * view.strides[axis];
    }
    std::byte* const to = copy.get() + row * row_bytes;
    if (gpu != nullptr) {
      RETURN_IF_ERROR(gpu->Read(from, stride, row_bytes, together, to));
    } else {
      std::memcpy(to, from, static_cast<size_t>(row_bytes));
    }
  }
  return copy;
}

absl::StatusOr<TensorPlace> PlaceTensor(const v1::RegionSlice& slice, int64_t count, DType dtype,
                                        const CallerRegions& regions, const std::string& field) {
  if (slice.strides_size() != 0) {
    return InvalidField(field + ".strides", "a result is written in C order");
  }
  TensorPlace place;
  ASSIGN_OR_RETURN(place.region, RegionOf(slice, regions, field, TensorMemory::kCopied));
  RETURN_IF_ERROR(
      CheckWithin(slice, *place.region, count * DTypeBytes(dtype), DTypeBytes(dtype), field));
  place.slice = slice;
  return place;
}

void SetShape(DType dtype, std::initializer_list<int64_t> shape, v1::Tensor& tensor) {
  tensor.set_dtype(ToProto(dtype));
  for (const int64_t size : shape) tensor.add_shape(size);
}

void FillTensor(std::span<const float> values, DType dtype, std::initializer_list<int64_t> shape,
                v1::Tensor& tensor) {
  SetShape(dtype, shape, tensor);
  std::string& data = *tensor.mutable_data();
  data.resize(values.size() * DTypeBytes(dtype));
  FromFloat(dtype, values.data(), static_cast<int64_t>(values.size()),
            reinterpret_cast<std::byte*>(data.data()));
}

absl::Status FillTensor(std::span<const float> values, DType dtype,
                        std::initializer_list<int64_t> shape, const TensorPlace& place,
                        v1::Tensor& tensor) {
  if (place.region == nullptr) {
    FillTensor(values, dtype, shape, tensor);
    return absl::OkStatus();
  }
  SetShape(dtype, shape, tensor);
  *tensor.mutable_slice() = place.slice;
  const auto count = static_cast<int64_t>(values.size());
  std::byte* const to = place.region->bytes.data() + place.slice.offset();
  if (place.region->gpu_memory == nullptr) {
    FromFloat(dtype, values.data(), count, to);
    return absl::OkStatus();
  }
  std::vector<std::byte> rounded(static_cast<size_t>(count * DTypeBytes(dtype)));
  FromFloat(dtype, values.data(), count, rounded.data());
  return place.region->gpu_memory->Write(to, rounded.data(), static_cast<int64_t>(rounded.size()));
}

void FillTensor(std::span<const uint32_t> values, v1::Tensor& tensor) {
  FillRaw(values, v1::DTYPE_U32, tensor);
}

void FillTensor(std::span<const uint8_t> values, v1::Tensor& tensor) {
  FillRaw(values, v1::DTYPE_U8, tensor);
}

}  // namespace spillway
