#include "engine/ordered_queues.h"

#include <cassert>
#include <exception>
#include <utility>

namespace spillway {

void RunStep(std::function<void()> step) {
  thread_local std::vector<std::function<void()>>* running = nullptr;
  if (running != nullptr) {
    running->push_back(std::move(step));
    return;
  }
  std::vector<std::function<void()>> steps;
  running = &steps;
  // An exception of one step (out of memory) must not stop the others: operations wait for them.
  std::exception_ptr first;
  const auto run = [&first](const std::function<void()>& step) {
    try {
      step();
    } catch (...) {
      if (first == nullptr) first = std::current_exception();
    }
  };
  run(step);
  for (size_t i = 0; i < steps.size(); ++i) {
    // Moved out first: a step may add steps, and so move the vector's elements.
    const std::function<void()> next = std::move(steps[i]);
    run(next);
  }
  running = nullptr;
  if (first != nullptr) std::rethrow_exception(first);
}

void OrderedQueues::Enqueue(std::span<Queue* const> queues, std::shared_ptr<Operation> operation) {
  Operation* const op = operation.get();
  op->queues_.assign(queues.begin(), queues.end());
  op->self_ = std::move(operation);
  {
    const MutexLock lock(mutex_);
    ++operation_count_;
    for (Queue* queue : queues) {
      op->blocked_queue_count_ += queue->operations_.empty() ? 0 : 1;
      queue->operations_.push_back(op);
    }
    if (op->blocked_queue_count_ > 0) return;
  }
  RunStep([op] { op->Start(); });
}

void OrderedQueues::Finish(Operation& operation) {
  std::vector<Operation*> ready;
  std::shared_ptr<Operation> self;
  {
    const MutexLock lock(mutex_);
    for (Queue* queue : operation.queues_) {
      assert(!queue->operations_.empty() && queue->operations_.front() == &operation);
      queue->operations_.erase(queue->operations_.begin());
      if (queue->operations_.empty()) continue;
      Operation* const next = queue->operations_.front();
      if (--next->blocked_queue_count_ == 0) ready.push_back(next);
    }
    self = std::move(operation.self_);
  }
  for (Operation* next : ready) RunStep([next] { next->Start(); });
  self.reset();
  const MutexLock lock(mutex_);
  // Under the lock: the thread that waits may destroy this as soon as the lock is released.
  if (--operation_count_ == 0) none_.NotifyAll();
}

void OrderedQueues::AwaitNone() {
  const MutexLock lock(mutex_);
  while (operation_count_ > 0) none_.Wait(mutex_);
}

bool OrderedQueues::IsIdle(const Queue& queue) const {
  const MutexLock lock(mutex_);
  return queue.operations_.empty();
}

}  // namespace spillway
