#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>

#include "host/base/host_device.h"
#include "host/core/keyed_hash.h"

namespace spillway::bench {

// The pattern: the value of the 8-byte word at byte 8 * word of a span. It is a hash of its
// position, so that a row from another place does not pass for the right one.
SPILLWAY_HOST_DEVICE inline uint64_t PatternWord(uint64_t word) { return SplitMix64(word); }

// The following functions run on all cores. `rows` are row numbers in the span; row_bytes is a
// multiple of 8.

// Fills the whole span with the pattern.
void FillPattern(std::span<std::byte> span);

// Overwrites rows with words that all differ from the pattern.
void PoisonRows(std::span<std::byte> span, std::span<const uint32_t> rows, int64_t row_bytes);

// The index in `rows` of the first row that does not hold the pattern.
std::optional<int64_t> FindWrongRow(std::span<const std::byte> span, std::span<const uint32_t> rows,
                                    int64_t row_bytes);

}  // namespace spillway::bench
