#include "daemon/engine/ordered_queues.h"

#include <cassert>
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
  step();
  for (size_t i = 0; i < steps.size(); ++i) {
    // Moved out: a step may add others and so move the list.
    const std::function<void()> next = std::move(steps[i]);
    next();
  }
  running = nullptr;
}

void OrderedQueues::Enqueue(std::span<Lane* const> lanes, std::shared_ptr<Operation> operation) {
  Operation* const op = operation.get();
  op->lanes_.assign(lanes.begin(), lanes.end());
  op->self_ = std::move(operation);
  {
    const MutexLock lock(mutex_);
    for (Lane* lane : lanes) {
      op->blocked_lane_count_ += lane->queue_.empty() ? 0 : 1;
      lane->queue_.push_back(op);
    }
    if (op->blocked_lane_count_ > 0) return;
  }
  RunStep([op] { op->Start(); });
}

void OrderedQueues::Finish(Operation& operation) {
  std::vector<Operation*> ready;
  std::shared_ptr<Operation> self;
  {
    const MutexLock lock(mutex_);
    for (Lane* lane : operation.lanes_) {
      assert(!lane->queue_.empty() && lane->queue_.front() == &operation);
      lane->queue_.erase(lane->queue_.begin());
      if (lane->queue_.empty()) continue;
      Operation* const next = lane->queue_.front();
      if (--next->blocked_lane_count_ == 0) ready.push_back(next);
    }
    self = std::move(operation.self_);
  }
  for (Operation* next : ready) RunStep([next] { next->Start(); });
}

bool OrderedQueues::IsIdle(const Lane& lane) const {
  const MutexLock lock(mutex_);
  return lane.queue_.empty();
}

}  // namespace spillway
