#pragma once

#include <cstdint>

namespace spillway {

enum class Promise : uint8_t { kExact, kStatistical, kNone };

// What an attend reports about the error of one query head's output.
struct Certificate {
  int64_t visible_token_count = 0;
  int64_t heavy_token_count = 0;    // of the KV head's group; without sink and window
  int64_t sampled_token_count = 0;  // of the KV head's group
  float relative_error = 0;         // estimated, at confidence 1 - delta
  float tail_mass = 0;              // share of the softmax mass in the tail; NaN: unknown
  Promise promise = Promise::kExact;
};

}  // namespace spillway
