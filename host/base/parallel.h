#pragma once

#include <tbb/parallel_for.h>
#include <tbb/task_arena.h>

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

}  // namespace spillway
