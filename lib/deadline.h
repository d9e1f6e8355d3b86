#pragma once

#include "absl/time/time.h"
#include "host/base/steady_time.h"

namespace spillway {

// The moment `seconds` from now. kNever if seconds is negative, NaN, or at least 1e9.
inline SteadyTime After(double seconds) {
  if (!(seconds >= 0 && seconds < 1e9)) return kNever;
  return After(SteadyNow(), absl::Seconds(seconds));
}

}  // namespace spillway
