// Tensors of the API and the engine's bytes.
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
#include "daemon/engine/regions.h"
#include "host/model/model_spec.h"
#include "spillway/v1/tensor.pb.h"

namespace spillway {

// A dimension that a tensor must have, or kAnyDim: at least 1.
inline constexpr int64_t kAnyDim = -1;

std::optional<DType> FromProto(v1::DType dtype);
v1::DType ToProto(DType dtype);

// Where the elements of a tensor are: in its message, or in a region.
struct TensorView {
  DType dtype = DType::kF32;
  const std::byte* data = nullptr;
  // Between neighbours of each dimension, bytes.
  std::array<int64_t, 4> strides = {};
  // What is not in the message: others may write to it meanwhile.
  std::shared_ptr<const Region> region;
};

// Checks an F32, F16 or BF16 tensor: rank, dimensions, and that its bytes are
// exactly what dtype and shape say, or that all of them lie in a region. Errors
// name `field` and what in it is wrong: INVALID_ARGUMENT, or NOT_FOUND for the
// region, which is not looked at. kCopied: memory of a GPU is refused where it cannot be
// copied to the host, as an engine's in its client's own process; kAny: it may be any.
enum class TensorMemory { kCopied, kAny };
absl::StatusOr<TensorView> ViewTensor(const v1::Tensor& tensor,
                                      std::initializer_list<int64_t> shape,
                                      const CallerRegions& regions, const std::string& field,
                                      TensorMemory memory = TensorMemory::kCopied);
inline const std::byte* BytesOf(const v1::Tensor& tensor) {
  return reinterpret_cast<const std::byte*>(tensor.data().data());
}
// The elements of a view in C order, in memory that nobody else writes to. An error is a
// GPU's, which they are copied from.
absl::StatusOr<std::shared_ptr<const std::byte[]>> CopyOf(const TensorView& view,
                                                          std::span<const int64_t> shape);

// Where rows shall be written, as they lie in a region.
struct TensorTarget {
  std::byte* data = nullptr;
  // Between neighbours of each dimension, bytes.
  std::array<int64_t, 4> strides = {};
  std::shared_ptr<const Region> region;
};
// shape: 1 to 4 dimensions, which may be 0. INVALID_ARGUMENT or NOT_FOUND naming `field`.
absl::StatusOr<TensorTarget> TargetOf(const v1::RegionSlice& slice, std::span<const int64_t> shape,
                                      DType dtype, const CallerRegions& regions,
                                      const std::string& field, TensorMemory memory);

// Where a result shall be written: elements of a region, in C order.
struct TensorPlace {
  std::shared_ptr<const Region> region;  // null: into the answer
  v1::RegionSlice slice;
};
// INVALID_ARGUMENT or NOT_FOUND naming `field`.
absl::StatusOr<TensorPlace> PlaceTensor(const v1::RegionSlice& slice, int64_t count, DType dtype,
                                        const CallerRegions& regions, const std::string& field);

// A tensor of values, rounded to nearest even where dtype is narrower.
void FillTensor(std::span<const float> values, DType dtype, std::initializer_list<int64_t> shape,
                v1::Tensor& tensor);
// The same with the elements where they were wanted. An error is a GPU's, which they are
// copied to.
absl::Status FillTensor(std::span<const float> values, DType dtype,
                        std::initializer_list<int64_t> shape, const TensorPlace& place,
                        v1::Tensor& tensor);
// One-dimensional tensors of raw elements.
void FillTensor(std::span<const uint32_t> values, v1::Tensor& tensor);
void FillTensor(std::span<const uint8_t> values, v1::Tensor& tensor);

}  // namespace spillway
