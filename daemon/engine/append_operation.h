#pragma once

#include <memory>
#include <vector>

#include "daemon/engine/engine.h"
#include "host/base/mutex.h"

namespace spillway {

// One chunk of one sequence: a device job per layer.
class Engine::AppendOperation : public OrderedQueues::Operation {
 public:
  AppendOperation(Engine* engine, AppendRequest request, Done<AppendOutcome> done)
      : engine_(engine), request_(std::move(request)), done_(std::move(done)) {}

  void Start() override;

 private:
  // Finds the layers to append to.
  absl::Status Check();
  // Layer layers_[index]; with the job's end the next one follows.
  void Submit(size_t index);
  void OnJobDone(std::unique_ptr<Job> job) ABSL_LOCKS_EXCLUDED(mutex_);
  void End() ABSL_LOCKS_EXCLUDED(mutex_);
  // Answers and lets the next operation start.
  void End(absl::Status status);

  Engine* const engine_;
  const AppendRequest request_;
  const Done<AppendOutcome> done_;
  std::vector<int> layers_;  // to append to, ascending
  Mutex mutex_;
  size_t next_ ABSL_GUARDED_BY(mutex_) = 0;     // of layers_
  size_t running_ ABSL_GUARDED_BY(mutex_) = 0;  // jobs
  absl::Status status_ ABSL_GUARDED_BY(mutex_);
  int failed_layer_ ABSL_GUARDED_BY(mutex_) = 0;  // that status_ is of
};

}  // namespace spillway
