#include "host/cpu/worker_pinning.h"

#include <sched.h>

namespace spillway {

WorkerPinning::WorkerPinning(tbb::task_arena& arena, int worker_count)
    : tbb::task_scheduler_observer(arena) {
  cpu_set_t allowed;
  if (sched_getaffinity(0, sizeof allowed, &allowed) != 0) return;
  for (int i = 0; i < CPU_SETSIZE; ++i) {
    if (CPU_ISSET(i, &allowed)) processors_.push_back(i);
  }
  if (static_cast<int>(processors_.size()) == worker_count) observe(true);
}

WorkerPinning::~WorkerPinning() { observe(false); }

void WorkerPinning::on_scheduler_entry(bool is_worker) {
  thread_local bool pinned = false;
  if (!is_worker || pinned) return;
  cpu_set_t one;
  CPU_ZERO(&one);
  CPU_SET(processors_[next_.fetch_add(1, std::memory_order_relaxed) % processors_.size()], &one);
  // A worker that cannot be pinned runs where the system puts it.
  pinned = sched_setaffinity(0, sizeof one, &one) == 0;
}

}  // namespace spillway
