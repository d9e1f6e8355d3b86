#include "host/device/turns.h"

namespace spillway {

void Turns::Begin(int64_t owner) {
  const MutexLock lock(mutex_);
  if (free_ > 0) {
    --free_;
    order_.Served(owner);
    return;
  }
  Waiter waiter;
  waiter.owner = owner;
  waiting_.push_back(&waiter);
  while (!waiter.may_begin) waiter.changed.Wait(mutex_);
}

void Turns::End() {
  const MutexLock lock(mutex_);
  if (waiting_.empty()) {
    ++free_;
    return;
  }
  // The turn goes to the thread that is next among those that wait, not to the quickest.
  const auto at = order_.Next(waiting_, [](const Waiter* waiter) { return waiter->owner; });
  Waiter* const next = *at;
  waiting_.erase(at);
  next->may_begin = true;
  // Under the lock: the waiter is destroyed as soon as its thread sees may_begin.
  next->changed.NotifyOne();
}

int Turns::waiting_count() const {
  const MutexLock lock(mutex_);
  return static_cast<int>(waiting_.size());
}

}  // namespace spillway
