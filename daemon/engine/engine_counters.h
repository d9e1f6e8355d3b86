#pragma once

#include <array>
#include <atomic>
#include <cstdint>

#include "daemon/engine/distribution.h"

namespace spillway {

// Seconds, from 20 us to 10 s.
inline constexpr std::array<double, 18> kSecondsBounds = {
    20e-6, 50e-6, 100e-6, 200e-6, 500e-6, 1e-3, 2e-3, 5e-3, 10e-3,
    20e-3, 50e-3, 0.1,    0.2,    0.5,    1,    2,    5,    10};
using SecondsDistribution = Distribution<kSecondsBounds.size()>;

// Relative errors that certificates tell.
inline constexpr std::array<double, 10> kErrorBounds = {0.005, 0.01, 0.02, 0.03, 0.05,
                                                        0.075, 0.1,  0.15, 0.2,  0.5};
using ErrorDistribution = Distribution<kErrorBounds.size()>;

// What the engine counts beside WorkCounters, since its start. Thread-safe, each counter by
// itself.
struct EngineCounters {
  // Of requests to attend, by layer and message: until their turn came, and until their answer.
  SecondsDistribution attend_wait{kSecondsBounds};
  SecondsDistribution attend{kSecondsBounds};
  // Device time of jobs that attend.
  SecondsDistribution attend_device{kSecondsBounds};
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
