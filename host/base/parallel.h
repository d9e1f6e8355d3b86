#pragma once

#include <tbb/parallel_for.h>
#include <tbb/task_arena.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>

namespace spillway {

// While a SerialScope lives, the loops below run in the thread that created it. Used where waking a
// worker would cost more than the work.
class SerialScope {
 public:
  SerialScope() : outer_(active_) { active_ = true; }
  ~SerialScope() { active_ = outer_; }
  SerialScope(const SerialScope&) = delete;
  SerialScope& operator=(const SerialScope&) = delete;

  static bool active() { return active_; }

 private:
  inline static thread_local bool active_ = false;
  const bool outer_;
};

// Most threads of a loop.
inline int LoopThreads() {
  return SerialScope::active() ? 1 : tbb::this_task_arena::max_concurrency();
}

// Calls f(i) for every i in [begin, end), on the workers of the current TBB task arena.
template <typename Index, typename F>
void ParallelFor(Index begin, Index end, const F& f) {
  if (SerialScope::active()) {
    for (Index i = begin; i < end; ++i) f(i);
  } else {
    tbb::parallel_for(begin, end, f);
  }
}

// Returns f(). While this thread waits for parallel loops inside f, it runs no outside tasks.
template <typename F>
auto Isolated(const F& f) {
  return SerialScope::active() ? f() : tbb::this_task_arena::isolate(f);
}

// How many threads share a loop of a decode step. work: how many pieces of some microseconds there
// are in all. One thread does few: waking a worker takes longer, and workers that wake spin for a
// while, beside the caller's threads.
inline size_t ShareCount(int64_t work, int thread_count) {
  constexpr int64_t kWorkOfShare = 128;
  const int64_t shares_max = std::clamp(thread_count, 1, 8);
  return static_cast<size_t>(std::clamp<int64_t>(work / kWorkOfShare, 1, shares_max));
}

// Calls f(i) for every i in [0, count), in so many shares.
template <typename F>
void InShares(size_t shares, size_t count, const F& f) {
  const auto run = [&](size_t share) {
    for (size_t i = share; i < count; i += shares) f(i);
  };
  if (shares == 1) return run(0);
  Isolated([&] { ParallelFor(size_t{0}, shares, run); });
}

}  // namespace spillway
