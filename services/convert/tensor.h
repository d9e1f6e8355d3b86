// Conversion between tensors of the API and bytes of the engine.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <memory>
#include <optional>
#include <span>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "engine/regions.h"
#include "host/model/model_spec.h"
#include "spillway/v1/tensor.pb.h"

namespace spillway {

// In the shape that a tensor must have: any dimension of at least 1.
inline constexpr int64_t kAnyDim = -1;

std::optional<DType> FromProto(v1::DType dtype);
v1::DType ToProto(DType dtype);

// Where the elements of a tensor are: in its message, or in a region.
struct TensorView {
  DType dtype = DType::kF32;
  const std::byte* data = nullptr;
  // Bytes from one element to the next in each dimension.
  std::array<int64_t, 4> strides = {};
  // The region, if the elements are not in the message. Others may write to it at any time.
  std::shared_ptr<const Region> region;
};

// Checks an F32, F16 or BF16 tensor: rank, dimensions, and that its bytes are exactly those of
// dtype and shape, or that all of them are within a region. The contents of a region are not read.
// Errors name `field` and what is wrong in it: INVALID_ARGUMENT, or NOT_FOUND for the region.
// memory: kCopied refuses GPU memory that cannot be copied to the host, such as that of an embedded
// engine's process; kAny takes all memory.
enum class TensorMemory { kCopied, kAny };
absl::StatusOr<TensorView> ViewTensor(const v1::Tensor& tensor,
                                      std::initializer_list<int64_t> shape,
                                      const CallerRegions& regions, const std::string& field,
                                      TensorMemory memory = TensorMemory::kCopied);
inline const std::byte* BytesOf(const v1::Tensor& tensor) {
  return reinterpret_cast<const std::byte*>(tensor.data().data());
}
// Copies the elements of a view, in C order, to memory to which nobody else writes. An error is one
// of the GPU from which they are copied.
absl::StatusOr<std::shared_ptr<const std::byte[]>> CopyOf(const TensorView& view,
                                                          std::span<const int64_t> shape);

// Where rows are written in a region.
struct TensorTarget {
  std::byte* data = nullptr;
  // Bytes from one element to the next in each dimension.
  std::array<int64_t, 4> strides = {};
  std::shared_ptr<const Region> region;
};
// shape: 1 to 4 dimensions, each of which may be 0. INVALID_ARGUMENT or NOT_FOUND, naming `field`.
absl::StatusOr<TensorTarget> TargetOf(const v1::RegionSlice& slice, std::span<const int64_t> shape,
                                      DType dtype, const CallerRegions& regions,
                                      const std::string& field, TensorMemory memory);

// Where a result is written: in C order, in a region or in the answer.
struct TensorPlace {
  std::shared_ptr<const Region> region;  // null: into the answer
  v1::RegionSlice slice;
};
// INVALID_ARGUMENT or NOT_FOUND naming `field`.
absl::StatusOr<TensorPlace> PlaceTensor(const v1::RegionSlice& slice, int64_t count, DType dtype,
                                        const CallerRegions& regions, const std::string& field);

// Sets the element type and the dimensions of a new tensor.
void SetShape(DType dtype, std::initializer_list<int64_t> shape, v1::Tensor& tensor);
// Fills a tensor with values, rounded to nearest even if dtype is narrower.
void FillTensor(std::span<const float> values, DType dtype, std::initializer_list<int64_t> shape,
                v1::Tensor& tensor);
// The same, with the elements written to `place`. An error is one of the GPU to which they are
// copied.
absl::Status FillTensor(std::span<const float> values, DType dtype,
                        std::initializer_list<int64_t> shape, const TensorPlace& place,
                        v1::Tensor& tensor);
// One-dimensional tensors of raw elements.
void FillTensor(std::span<const uint32_t> values, v1::Tensor& tensor);
void FillTensor(std::span<const uint8_t> values, v1::Tensor& tensor);

}  // namespace spillway
