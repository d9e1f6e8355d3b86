#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>

#include "host/core/host_device.h"
#include "host/core/keyed_hash.h"

namespace spillway::bench {

// What the 8-byte word at byte 8 * word of a span holds: a hash of its
// address, so that a row from elsewhere is never taken for the right one.
SPILLWAY_HOST_DEVICE inline uint64_t PatternWord(uint64_t word) { return SplitMix64(word); }

// The following run on all cores. Rows are numbers of rows of row_bytes, a
// multiple of 8, within the span.

// Writes the pattern all over the span.
void FillPattern(std::span<std::byte> span);

// Overwrites rows with what the pattern does not hold there.
void PoisonRows(std::span<std::byte> span, std::span<const uint32_t> rows, int64_t row_bytes);

// The first row of the list that does not hold the pattern: an index into it.
std::optional<int64_t> FindWrongRow(std::span<const std::byte> span, std::span<const uint32_t> rows,
                                    int64_t row_bytes);

}  // namespace spillway::bench
