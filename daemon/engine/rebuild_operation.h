#pragma once

#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <vector>

#include "daemon/engine/engine.h"
#include "host/base/mutex.h"

namespace spillway {

// Makes the codes of a sequence whose rows an earlier process left, ahead of all that is asked of
// it: device jobs that append rows which are there already.
class Engine::RebuildOperation : public OrderedQueues::Operation {
 public:
  using Rebuilt = std::function<void(const Sequence&, const absl::Status&)>;

  RebuildOperation(Engine* engine, std::shared_ptr<Sequence> sequence, Rebuilt rebuilt)
      : engine_(engine), sequence_(std::move(sequence)), rebuilt_(std::move(rebuilt)) {}

  // Waits for the rebuilder.
  void Start() override;
  // Called by the rebuilder, once.
  void Run();

 private:
  // The next piece of layer layers_[index].
  void Submit(size_t index);
  void OnJobDone(size_t index, const Job& job) ABSL_LOCKS_EXCLUDED(mutex_);
  absl::Status Prepare();
  // Lets the records follow, and requests be served.
  void End(absl::Status status);

  Engine* const engine_;
  const std::shared_ptr<Sequence> sequence_;
  const Rebuilt rebuilt_;
  std::vector<int> layers_;  // that have rows
  Mutex mutex_;
  size_t next_ ABSL_GUARDED_BY(mutex_) = 0;     // of layers_
  size_t running_ ABSL_GUARDED_BY(mutex_) = 0;  // layers
  absl::Status status_ ABSL_GUARDED_BY(mutex_);
};

// Takes over the codes of a beginning that two such sequences have in common, in the turns of
// both: once those of `source` are made, and before the sequence's own are.
class Engine::ShareCodesOperation : public OrderedQueues::Operation {
 public:
  ShareCodesOperation(Engine* engine, std::shared_ptr<Sequence> source,
                      std::shared_ptr<Sequence> sequence, int64_t token_count)
      : engine_(engine),
        source_(std::move(source)),
        sequence_(std::move(sequence)),
        token_count_(token_count) {}

  // Where they cannot be taken over they are made anew.
  void Start() override;

 private:
  Engine* const engine_;
  const std::shared_ptr<Sequence> source_;
  const std::shared_ptr<Sequence> sequence_;
  const int64_t token_count_;
};

// Lets a few sequences be rebuilt at a time. Thread-safe.
class Engine::Rebuilder {
 public:
  // So many will be added, when their turn comes.
  void Expect(int64_t count) ABSL_LOCKS_EXCLUDED(mutex_);
  // Runs it, now or when another has ended.
  void Add(RebuildOperation* operation) ABSL_LOCKS_EXCLUDED(mutex_);
  // One that ran has ended.
  void Ended(bool ok) ABSL_LOCKS_EXCLUDED(mutex_);
  void CountRows(int64_t bytes) ABSL_LOCKS_EXCLUDED(mutex_);
  bool stopping() const ABSL_LOCKS_EXCLUDED(mutex_);
  // Fails those that wait, or are still to be added, and returns when none runs.
  void Stop() ABSL_LOCKS_EXCLUDED(mutex_);
  RebuildProgress progress() const ABSL_LOCKS_EXCLUDED(mutex_);

 private:
  mutable Mutex mutex_;
  CondVar ended_;
  std::deque<RebuildOperation*> waiting_ ABSL_GUARDED_BY(mutex_);
  int running_ ABSL_GUARDED_BY(mutex_) = 0;
  bool stopping_ ABSL_GUARDED_BY(mutex_) = false;
  RebuildProgress progress_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace spillway
