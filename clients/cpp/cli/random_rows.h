// Normal random tensors in the dtype of a model, fast enough for gigabytes.
#pragma once

#include <array>
#include <cstdint>
#include <random>
#include <string>

#include "spillway/v1/tensor.pb.h"

namespace spillway::cli {

// Draws elements from a table of 65,536 normal values. The same seed gives the
// same elements. Not thread-safe.
class RandomRows {
 public:
  // REQUIRES: dtype is DTYPE_F32, DTYPE_F16 or DTYPE_BF16; stddev >= 0.
  RandomRows(v1::DType dtype, double stddev, uint64_t seed);

  // The bytes of `element_count` elements.
  std::string Draw(size_t element_count);

 private:
  template <typename Word>
  void Fill(std::string& bytes);

  const v1::DType dtype_;
  std::mt19937_64 random_;
  // The values' bits; 16-bit types use the low half.
  std::array<uint32_t, size_t{1} << 16> table_;
};

}  // namespace spillway::cli
