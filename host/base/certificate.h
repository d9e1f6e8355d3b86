#pragma once

#include <cstdint>

namespace spillway {

enum class Promise : uint8_t { kExact, kStatistical, kNone };

// What one attend knows of its error, per query head.
struct Certificate {
  int64_t visible_token_count = 0;
  int64_t heavy_token_count = 0;    // of the group; sink and window apart
  int64_t sampled_token_count = 0;  // of the group
  float relative_error = 0;         // estimated, at confidence 1 - delta
  float tail_mass = 0;              // share of the softmax mass in the tail; NaN: unknown
  Promise promise = Promise::kExact;
};

}  // namespace spillway
