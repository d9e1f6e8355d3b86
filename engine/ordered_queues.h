#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "host/base/mutex.h"

namespace spillway {

// Orders operations. Each queue runs one operation at a time, first come, first served. An
// operation on several queues joins all of them at once, and starts when it is at the head of each.
// So two such operations cannot wait for each other. No threads of its own: an operation starts in
// the thread that enqueues it, or in the thread that ended the operation before it. Thread-safe.
class OrderedQueues {
 public:
  class Operation;

  // A member of the object whose operations it orders. REQUIRES: empty when it is destroyed.
  class Queue {
   public:
    Queue() = default;
    Queue(const Queue&) = delete;
    Queue& operator=(const Queue&) = delete;

   private:
    friend class OrderedQueues;
    std::vector<Operation*> operations_;  // guarded by OrderedQueues::mutex_
  };

  // An operation runs once. It is kept alive until Finish().
  class Operation {
   public:
    virtual ~Operation() = default;
    // Called once, without locks. Finish() must follow, in this call or later in any thread.
    virtual void Start() = 0;

   private:
    friend class OrderedQueues;
    std::vector<Queue*> queues_;
    size_t blocked_queue_count_ = 0;
    std::shared_ptr<Operation> self_;
  };

  // Adds the operation to the queues, which must be distinct. May call Start() before it returns.
  void Enqueue(std::span<Queue* const> queues, std::shared_ptr<Operation> operation);
  // Ends the operation. Operations that waited for it start in this thread.
  void Finish(Operation& operation);
  // Whether nothing is queued or running on the queue.
  bool IsIdle(const Queue& queue) const;
  // Waits until no operation is left. An operation that has answered still holds objects, such as a
  // sequence, until it is destroyed.
  void AwaitNone() ABSL_LOCKS_EXCLUDED(mutex_);

 private:
  mutable Mutex mutex_;
  int64_t operation_count_ ABSL_GUARDED_BY(mutex_) = 0;
  CondVar none_;
};

// Runs `step` now, or, if this thread is running a step already, after that step. So a device that
// answers within Submit() cannot make the stack grow. Rethrows the first exception after all steps
// have run.
void RunStep(std::function<void()> step);

}  // namespace spillway
