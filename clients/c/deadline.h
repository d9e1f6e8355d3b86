#pragma once

#include <chrono>

namespace spillway {

// The time point `seconds` from now. Never, if seconds is negative, NaN, or at least 1e9.
template <typename Clock>
typename Clock::time_point After(double seconds) {
  if (!(seconds >= 0 && seconds < 1e9)) return Clock::time_point::max();
  return Clock::now() + std::chrono::duration_cast<typename Clock::duration>(
                            std::chrono::duration<double>(seconds));
}

}  // namespace spillway
