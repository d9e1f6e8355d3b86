#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "host/base/mutex.h"

namespace spillway {

// Orders operations: each queue runs one at a time, first come first served; an
// operation on several queues waits in all of them at once and starts when
// it heads them all, so that two such operations cannot wait for each other.
// No threads of its own: an operation starts in the thread that queues it, or
// in the one that finished what stood in its way. Thread-safe.
class OrderedQueues {
 public:
  class Operation;

  // A member of what it orders. Goes only when nothing is queued.
  class Queue {
   public:
    Queue() = default;
    Queue(const Queue&) = delete;
    Queue& operator=(const Queue&) = delete;

   private:
    friend class OrderedQueues;
    std::vector<Operation*> operations_;  // guarded by OrderedQueues::mutex_
  };

  // Something to run once. Alive until Finish.
  class Operation {
   public:
    virtual ~Operation() = default;
    // Called once, without locks. Finish follows, from here or from any
    // thread later.
    virtual void Start() = 0;

   private:
    friend class OrderedQueues;
    std::vector<Queue*> queues_;
    size_t blocked_queue_count_ = 0;
    std::shared_ptr<Operation> self_;
  };

  // Queues the operation; queues are distinct. May call Start before it
  // returns.
  void Enqueue(std::span<Queue* const> queues, std::shared_ptr<Operation> operation);
  // The operation is over: what it held back may start, in this thread.
  void Finish(Operation& operation);
  // Whether nothing is queued or running on the queue.
  bool IsIdle(const Queue& queue) const;
  // Waits until no operation is left. One that has told its outcome still has what it held, a
  // sequence for one, until it is gone itself.
  void AwaitNone() ABSL_LOCKS_EXCLUDED(mutex_);

 private:
  mutable Mutex mutex_;
  int64_t operation_count_ ABSL_GUARDED_BY(mutex_) = 0;
  CondVar none_;
};

// Runs `step` now, or after the step that this thread is running already: a
// device that answers inside Submit cannot grow the stack.
void RunStep(std::function<void()> step);

}  // namespace spillway
