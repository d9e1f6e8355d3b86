#pragma once

#include <tbb/parallel_for.h>
#include <tbb/task_arena.h>

namespace spillway {

// While one lives, the loops below stay in the thread that made it: where to
// wake a worker costs more than the work.
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

// f(i) for every i of [begin, end), by the workers of this arena.
template <typename Index, typename F>
void ParallelFor(Index begin, Index end, const F& f) {
  if (SerialScope::active()) {
    for (Index i = begin; i < end; ++i) f(i);
  } else {
    tbb::parallel_for(begin, end, f);
  }
}

// f(); while it waits for loops of its own, this thread runs no other's tasks.
template <typename F>
auto Isolated(const F& f) {
  return SerialScope::active() ? f() : tbb::this_task_arena::isolate(f);
}

}  // namespace spillway
