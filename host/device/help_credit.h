#pragma once

#include <algorithm>
#include <chrono>

namespace spillway {

// What a thread inside long jobs may spend on short ones: as much time as it spent on the long
// ones, so that those keep half of it. What was saved up counts to a limit. Not thread-safe:
// each thread has its own.
class HelpCredit {
 public:
  using Time = std::chrono::steady_clock::time_point;
  using Duration = std::chrono::steady_clock::duration;
  static constexpr Duration kMax = std::chrono::milliseconds(100);

  // All time since the last call, but for Spent(), was the thread's own.
  bool MayHelp(Time now) {
    credit_ = std::min<Duration>(kMax, credit_ + (now - seen_));
    seen_ = now;
    return credit_ >= Duration::zero();
  }
  // The thread has helped since MayHelp() until now.
  void Spent(Time now) {
    credit_ -= now - seen_;
    seen_ = now;
  }

 private:
  Duration credit_ = Duration::zero();
  Time seen_ = std::chrono::steady_clock::now();
};

}  // namespace spillway
