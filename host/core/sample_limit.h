#pragma once

#include <cstdint>

#include "host/core/keyed_hash.h"

// A cheap first test of whether a token may be drawn: the upper bits of its
// place, or of its hash, against a limit that lies at or above the threshold.
// What passes is tested by its place.
namespace spillway {

// How many lower bits the test passes over.
inline constexpr int kSampleLimitShift = 17;
// Lets every token through.
inline constexpr uint16_t kSampleLimitAll = uint16_t{1} << (32 - kSampleLimitShift);

// Tokens with place >> kSampleLimitShift below it are all those below the
// threshold, at most 2^32, and few others.
SPILLWAY_HOST_DEVICE inline uint16_t PlaceLimit(uint64_t threshold) {
  constexpr uint64_t kUnit = uint64_t{1} << kSampleLimitShift;
  const uint64_t limit = (threshold + kUnit - 1) >> kSampleLimitShift;
  return static_cast<uint16_t>(limit < kSampleLimitAll ? limit : kSampleLimitAll);
}

// The same of (hash - order.phase) >> kSampleLimitShift, for tokens beyond the
// resident sample, whose places are that or less by its size.
SPILLWAY_HOST_DEVICE inline uint16_t HashLimit(const SampleOrder& order, uint64_t threshold) {
  return threshold <= order.resident ? uint16_t{0} : PlaceLimit(threshold + order.resident);
}

}  // namespace spillway
