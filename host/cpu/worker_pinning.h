#pragma once

#include <tbb/task_arena.h>
#include <tbb/task_scheduler_observer.h>

#include <atomic>
#include <vector>

namespace spillway {

// Pins each worker that enters an arena to a processor of its own, if there is one for every
// worker. Without this, the operating system may wake a worker behind another one, and not move it
// to an idle processor before the job is over. Callers' threads are not pinned. Observes from
// construction to destruction.
class WorkerPinning : public tbb::task_scheduler_observer {
 public:
  // Does nothing unless worker_count is the number of processors that the process may use.
  WorkerPinning(tbb::task_arena& arena, int worker_count);
  ~WorkerPinning() override;

  void on_scheduler_entry(bool is_worker) override;

 private:
  std::vector<int> processors_;
  std::atomic<size_t> next_{0};
};

}  // namespace spillway
