#pragma once

#include <cstdint>
#include <vector>

#include "host/model/limits.h"

namespace spillway {

// Positions whose mean is the centre of a KV head's keys. Codes exist from the
// moment a layer holds this many tokens.
inline constexpr int64_t kCentreTokenCount = 1024;
// Fewest rows a stratum's variance is estimated from.
inline constexpr int kStratumRowsMin = 8;
// Queries of one attend that are served sparsely; more are served densely.
inline constexpr int kSparseQueryCountMax = 16;

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

// Stratum of a selected row.
inline constexpr uint8_t kStratumSink = 0;
inline constexpr uint8_t kStratumWindow = 1;
inline constexpr uint8_t kStratumHeavy = 2;
inline constexpr uint8_t kStratumTail = 3;  // and up, by falling rank
inline constexpr int kTailStrataMax = 48;

// The rows chosen for one (query, KV head), ascending by token.
struct Selection {
  std::vector<uint32_t> indices;
  std::vector<float> log_weights;  // 0, or log(n_h / r_h) for a sampled row
  std::vector<uint8_t> strata;
};

}  // namespace spillway
