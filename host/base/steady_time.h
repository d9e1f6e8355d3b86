#pragma once

#include <chrono>

#include "absl/time/time.h"

namespace spillway {

// A moment on the clock of all durations (CLOCK_MONOTONIC): nobody sets it, and it stands still
// while the machine is suspended. Moments of all processes since the machine's start are
// comparable.
using SteadyTime = std::chrono::steady_clock::time_point;

inline constexpr SteadyTime kNever = SteadyTime::max();  // later than every other moment

inline SteadyTime SteadyNow() { return std::chrono::steady_clock::now(); }

// The moment `time` after `start`; kNever if one of them is infinite.
inline SteadyTime After(SteadyTime start, absl::Duration time) {
  if (start == kNever || time >= absl::FromChrono(kNever - start)) return kNever;
  return start + absl::ToChronoNanoseconds(time);
}

}  // namespace spillway
