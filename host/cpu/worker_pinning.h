#pragma once

#include <tbb/task_arena.h>
#include <tbb/task_scheduler_observer.h>

#include <atomic>
#include <vector>

namespace spillway {

// Keeps each worker that enters an arena to a processor of its own, where there
// is one for every worker: a kernel may wake a worker behind another one and
// not look for an idle processor before the job is over. Callers' threads stay
// free. Observes from construction to destruction.
class WorkerPinning : public tbb::task_scheduler_observer {
 public:
  // Does nothing unless worker_count is the count of processors allowed.
  WorkerPinning(tbb::task_arena& arena, int worker_count);
  ~WorkerPinning() override;

  void on_scheduler_entry(bool is_worker) override;

 private:
  std::vector<int> processors_;
  std::atomic<size_t> next_{0};
};

}  // namespace spillway
