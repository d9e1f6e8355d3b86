#pragma once

#include <array>
#include <atomic>
#include <cstdint>

#include "engine/stage_seconds.h"
#include "host/base/distribution.h"

namespace spillway {

// Upper bounds of the ranges of certified relative errors.
inline constexpr std::array<double, 10> kErrorBounds = {0.005, 0.01, 0.02, 0.03, 0.05,
                                                        0.075, 0.1,  0.15, 0.2,  0.5};
using ErrorDistribution = Distribution<kErrorBounds.size()>;

// What the engine counts since its start, beside WorkCounters. Thread-safe, each counter by itself.
struct EngineCounters {
  // For each request to attend (one layer, one message): time until its turn came, and until its
  // answer.
  SecondsDistribution attend_wait;
  SecondsDistribution attend;
  // Device time of jobs that attend.
  SecondsDistribution attend_device;
  // Stages of those jobs, if the device reports them.
  StageSeconds attend_stages;
  // Finite errors of certificates that are not exact.
  ErrorDistribution certified_errors{kErrorBounds};
  // Rows that were moved to a device over its link for attends, and their bytes.
  std::atomic<int64_t> moved_row_count{0};
  std::atomic<int64_t> moved_bytes{0};
  // Sequences that expired because their ttl ended, and because their clients were gone.
  std::atomic<int64_t> idle_expiry_count{0};
  std::atomic<int64_t> abandoned_expiry_count{0};
};

}  // namespace spillway
