#pragma once

#include <cstddef>

#include "host/base/row_format.h"

namespace spillway {

// Write one row of 8 bits from K and V [d] in the format's dtype, and the reverse. Elements are
// finite. Any alignment; in and out must not overlap. Thread-safe. REQUIRES: RowType::kInt8.
void EncodeInt8Row(const RowFormat& format, const std::byte* k, const std::byte* v, std::byte* row);
void DecodeInt8Row(const RowFormat& format, const std::byte* row, std::byte* k, std::byte* v);

// Whether the bytes can be a row: it can be decoded, to finite elements.
bool IsInt8Row(const RowFormat& format, const std::byte* row);

}  // namespace spillway
