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

// A parsed safetensors file: 8 bytes little-endian header length, a JSON
// header {"name": {"dtype", "shape", "data_offsets"}}, then the tensors'
// bytes without holes (github.com/huggingface/safetensors, "Format"). A view:
// the bytes outlive it. Thread-safe.
class SafeTensors {
 public:
  // INVALID_ARGUMENT for a malformed file, naming the tensor where one is at
  // fault: every range is inside the file, matches its shape and overlaps no
  // other.
  static absl::StatusOr<SafeTensors> Parse(std::span<const std::byte> file);

  bool Contains(std::string_view name) const;

  // The tensor's elements as fp32, in C order. It is F32, F16 or BF16, has
  // exactly this shape and only finite elements; else INVALID_ARGUMENT that
  // names it.
  absl::StatusOr<std::vector<float>> Load(std::string_view name,
                                          std::span<const int64_t> shape) const;
  // The same of a tensor of I32 or I64.
  absl::StatusOr<std::vector<int64_t>> LoadIntegers(std::string_view name,
                                                    std::span<const int64_t> shape) const;

 private:
  struct Tensor {
    std::string dtype;
    std::vector<int64_t> shape;
    std::span<const std::byte> data;
  };
  // The tensor, of this shape.
  absl::StatusOr<const Tensor*> Find(std::string_view name, std::span<const int64_t> shape) const;

  absl::flat_hash_map<std::string, Tensor> tensors_;
};

}  // namespace spillway
