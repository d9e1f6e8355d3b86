#pragma once

#include <algorithm>
#include <chrono>

namespace spillway {

// Limits the time that a thread inside long jobs spends on short ones to the time that it spends on
// long ones, so that long jobs keep half of its time. Unspent time is saved, up to kMax. Not
// thread-safe: each thread has its own.
class HelpCredit {
 public:
  using Time = std::chrono::steady_clock::time_point;
  using Duration = std::chrono::steady_clock::duration;
  static constexpr Duration kMax = std::chrono::milliseconds(100);

  // Whether the thread may help now. All time since the last call, except what Spent() reports,
  // counts as time on long jobs.
  bool MayHelp(Time now) {
    credit_ = std::min<Duration>(kMax, credit_ + (now - seen_));
    seen_ = now;
    return credit_ >= Duration::zero();
  }
  // Reports that the thread has helped from MayHelp() until now.
  void Spent(Time now) {
    credit_ -= now - seen_;
    seen_ = now;
  }

 private:
  Duration credit_ = Duration::zero();
  Time seen_ = std::chrono::steady_clock::now();
};

}  // namespace spillway
