#pragma once

#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <vector>

#include "engine/engine.h"
#include "host/base/mutex.h"

namespace spillway {

// Recomputes the codes of a sequence whose rows an earlier process left, before all requests for
// the sequence. Its device jobs append rows that are there already.
class Engine::RebuildOperation : public OrderedQueues::Operation {
 public:
  using Rebuilt = std::function<void(const Sequence&, const absl::Status&)>;

  RebuildOperation(Engine* engine, std::shared_ptr<Sequence> sequence, Rebuilt rebuilt)
      : engine_(engine), sequence_(std::move(sequence)), rebuilt_(std::move(rebuilt)) {}

  // Adds the operation to the rebuilder, which calls Run().
  void Start() override;
  // Called by the rebuilder, once.
  void Run();

 private:
  // Submits the next tokens of layer layers_[index].
  void Submit(size_t index);
  void OnJobDone(size_t index, const Job& job) ABSL_LOCKS_EXCLUDED(mutex_);
  absl::Status Prepare();
  // Ends the rebuilding. If it succeeded, the records follow the rows from then on, and requests
  // are served.
  void End(absl::Status status);

  Engine* const engine_;
  const std::shared_ptr<Sequence> sequence_;
  const Rebuilt rebuilt_;
  std::vector<int> layers_;  // that have rows without codes
  Mutex mutex_;
  size_t next_ ABSL_GUARDED_BY(mutex_) = 0;     // index into layers_
  size_t running_ ABSL_GUARDED_BY(mutex_) = 0;  // layers on the device
  absl::Status status_ ABSL_GUARDED_BY(mutex_);
};

// Takes over the codes of a prefix that two restored sequences share. Runs in the turns of both:
// after the codes of `source` were computed, and before those of `sequence` are.
class Engine::ShareCodesOperation : public OrderedQueues::Operation {
 public:
  ShareCodesOperation(Engine* engine, std::shared_ptr<Sequence> source,
                      std::shared_ptr<Sequence> sequence, int64_t token_count)
      : engine_(engine),
        source_(std::move(source)),
        sequence_(std::move(sequence)),
        token_count_(token_count) {}

  // If they cannot be taken over, they are recomputed.
  void Start() override;

 private:
  Engine* const engine_;
  const std::shared_ptr<Sequence> source_;
  const std::shared_ptr<Sequence> sequence_;
  const int64_t token_count_;
};

// Limits how many sequences are rebuilt at the same time. Thread-safe.
class Engine::Rebuilder {
 public:
  // Announces that `count` operations will be added, when their turns come. The others are those of
  // RebuildProgress.
  void Expect(int64_t count, int64_t lost_count, int64_t damaged_count) ABSL_LOCKS_EXCLUDED(mutex_);
  // Runs the operation, now or when another one has ended.
  void Add(RebuildOperation* operation) ABSL_LOCKS_EXCLUDED(mutex_);
  // Called when an operation that ran has ended.
  void Ended(bool ok) ABSL_LOCKS_EXCLUDED(mutex_);
  void CountRows(int64_t bytes) ABSL_LOCKS_EXCLUDED(mutex_);
  bool stopping() const ABSL_LOCKS_EXCLUDED(mutex_);
  // Fails operations that wait or are still to be added, and returns when all have ended.
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
