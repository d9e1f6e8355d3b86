#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "absl/status/statusor.h"

namespace spillway {

// A parsed safetensors file (github.com/huggingface/safetensors, "Format"). Its parts:
//   8 bytes: the header's length, little-endian
//   the header, JSON: {"name": {"dtype", "shape", "data_offsets"}}
//   the tensors' bytes, without gaps
// A view: the file's bytes must outlive it. Thread-safe.
class SafeTensors {
 public:
  // Checks that every tensor's range is inside the file, matches its shape, and overlaps no other.
  // If not, or if the file is malformed otherwise: INVALID_ARGUMENT, which names the tensor if one
  // is at fault.
  static absl::StatusOr<SafeTensors> Parse(std::span<const std::byte> file);

  bool Contains(std::string_view name) const;

  // The tensor's elements as fp32, in C order. INVALID_ARGUMENT, which names the tensor, unless it
  // is F32, F16 or BF16, has exactly this shape, and all its elements are finite.
  absl::StatusOr<std::vector<float>> Load(std::string_view name,
                                          std::span<const int64_t> shape) const;
  // The same for a tensor of I32 or I64.
  absl::StatusOr<std::vector<int64_t>> LoadIntegers(std::string_view name,
                                                    std::span<const int64_t> shape) const;

 private:
  struct Tensor {
    std::string dtype;
    std::vector<int64_t> shape;
    std::span<const std::byte> data;
  };
  // Finds the tensor and checks its shape.
  absl::StatusOr<const Tensor*> Find(std::string_view name, std::span<const int64_t> shape) const;

  absl::flat_hash_map<std::string, Tensor> tensors_;
};

}  // namespace spillway
