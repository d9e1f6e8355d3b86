#pragma once

#include <memory>
#include <vector>

#include "daemon/engine/engine.h"

namespace spillway {

// One chunk of one sequence: a device job per layer, one after the other.
class Engine::AppendOperation : public OrderedQueues::Operation {
 public:
  AppendOperation(Engine* engine, AppendRequest request, Done<AppendOutcome> done)
      : engine_(engine), request_(std::move(request)), done_(std::move(done)) {}

  void Start() override;

 private:
  // Finds the layers to append to.
  absl::Status Check();
  void SubmitNext();
  void OnJobDone(std::unique_ptr<Job> job);
  // Answers and lets the next operation start.
  void End(absl::Status status);

  Engine* const engine_;
  const AppendRequest request_;
  const Done<AppendOutcome> done_;
  std::vector<int> layers_;  // to append to, ascending
  size_t next_ = 0;          // of layers_
};

}  // namespace spillway
