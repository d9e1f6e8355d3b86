#pragma once

#include <cstdint>
#include <string_view>

#include "host/base/dtype.h"
#include "host/base/int8_row.h"

namespace spillway {

// How the engine stores the rows of K and V.
enum class RowType : uint8_t {
  kElements,  // as they are, [K(d) | V(d)] in the model's dtype
  kInt8,      // see host/base/int8_row.h
};

// "model" or "int8".
constexpr std::string_view RowTypeName(RowType type) {
  return type == RowType::kInt8 ? "int8" : "model";
}

// The format of a KV head's rows.
struct RowFormat {
  DType dtype = DType::kBF16;
  RowType type = RowType::kElements;
  int head_dim = 0;

  // Bytes of a row as it is stored, a multiple of 16.
  SPILLWAY_HOST_DEVICE constexpr int64_t row_bytes() const {
    return type == RowType::kInt8 ? Int8RowBytes(head_dim) : element_bytes();
  }
  // Bytes of a row [K(d) | V(d)] in the model's dtype, as clients see it.
  SPILLWAY_HOST_DEVICE constexpr int64_t element_bytes() const {
    return int64_t{2} * head_dim * DTypeBytes(dtype);
  }
  bool operator==(const RowFormat&) const = default;
};

}  // namespace spillway
