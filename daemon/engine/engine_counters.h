#pragma once

#include <array>
#include <atomic>
#include <cstdint>

#include "daemon/engine/stage_seconds.h"
#include "host/base/distribution.h"

namespace spillway {

// Relative errors that certificates tell.
inline constexpr std::array<double, 10> kErrorBounds = {0.005, 0.01, 0.02, 0.03, 0.05,
                                                        0.075, 0.1,  0.15, 0.2,  0.5};
using ErrorDistribution = Distribution<kErrorBounds.size()>;

// What the engine counts beside WorkCounters, since its start. Thread-safe, each counter by
// itself.
struct EngineCounters {
  // Of requests to attend, by layer and message: until their turn came, and until their answer.
  SecondsDistribution attend_wait;
  SecondsDistribution attend;
  // Device time of jobs that attend.
  SecondsDistribution attend_device;
  // Of those jobs, their stages, where the device tells them.
  StageSeconds attend_stages;
  // Finite ones of certificates that are not exact.
  ErrorDistribution certified_errors{kErrorBounds};
  // Rows that came to a device over its link for attends, and their bytes.
  std::atomic<int64_t> moved_row_count{0};
  std::atomic<int64_t> moved_bytes{0};
  // Sequences that went by their ttl, and those whose clients were gone.
  std::atomic<int64_t> idle_expiry_count{0};
  std::atomic<int64_t> abandoned_expiry_count{0};
};

}  // namespace spillway
