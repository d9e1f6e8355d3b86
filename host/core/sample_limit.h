#pragma once

#include <cstdint>

#include "host/core/keyed_hash.h"

// A fast first test whether a token is drawn. It compares the upper bits of the token's place, or
// of its hash, with a limit that is at or above the threshold. Tokens that pass are then tested by
// their place.
namespace spillway {

// Number of lower bits that the test ignores.
inline constexpr int kSampleLimitShift = 17;
// The limit that lets every token pass.
inline constexpr uint16_t kSampleLimitAll = uint16_t{1} << (32 - kSampleLimitShift);

// The tokens with (place >> kSampleLimitShift) below this limit include all tokens below the
// threshold, and few others. REQUIRES: threshold <= 2^32.
SPILLWAY_HOST_DEVICE inline uint16_t PlaceLimit(uint64_t threshold) {
  constexpr uint64_t kUnit = uint64_t{1} << kSampleLimitShift;
  const uint64_t limit = (threshold + kUnit - 1) >> kSampleLimitShift;
  return static_cast<uint16_t>(limit < kSampleLimitAll ? limit : kSampleLimitAll);
}

// The same for (hash - order.phase) >> kSampleLimitShift, for tokens outside the resident sample.
// The place of such a token is hash - order.phase, or that minus the size of the resident sample.
SPILLWAY_HOST_DEVICE inline uint16_t HashLimit(const SampleOrder& order, uint64_t threshold) {
  return threshold <= order.resident ? uint16_t{0} : PlaceLimit(threshold + order.resident);
}

}  // namespace spillway
