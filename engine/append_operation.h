#pragma once

#include <memory>
#include <vector>

#include "engine/engine.h"
#include "host/base/mutex.h"

namespace spillway {

// Appends a chunk to a sequence, with one device job per layer.
class Engine::AppendOperation : public OrderedQueues::Operation {
 public:
  AppendOperation(Engine* engine, AppendRequest request, Done<AppendOutcome> done)
      : engine_(engine), request_(std::move(request)), done_(std::move(done)) {}

  void Start() override;

 private:
  // Validates the request, and finds and prepares the layers to append to.
  absl::Status Check();
  // Submits the job of layer layers_[index]. When the job ends, the next layer follows.
  void Submit(size_t index);
  void OnJobDone(std::unique_ptr<Job> job) ABSL_LOCKS_EXCLUDED(mutex_);
  void End() ABSL_LOCKS_EXCLUDED(mutex_);
  // Answers the request, and lets the next operation start.
  void End(absl::Status status);

  Engine* const engine_;
  const AppendRequest request_;
  const Done<AppendOutcome> done_;
  std::vector<int> layers_;  // to append to, ascending
  Mutex mutex_;
  size_t next_ ABSL_GUARDED_BY(mutex_) = 0;     // index into layers_
  size_t running_ ABSL_GUARDED_BY(mutex_) = 0;  // running jobs
  absl::Status status_ ABSL_GUARDED_BY(mutex_);
  int failed_layer_ ABSL_GUARDED_BY(mutex_) = 0;  // the layer of status_
};

}  // namespace spillway
