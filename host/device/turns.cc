#include "host/device/turns.h"

namespace spillway {

void Turns::Begin() {
  const MutexLock lock(mutex_);
  if (free_ > 0) {
    --free_;
    return;
  }
  Waiter waiter;
  waiting_.push_back(&waiter);
  while (!waiter.may_begin) waiter.changed.Wait(mutex_);
}

void Turns::End() {
  const MutexLock lock(mutex_);
  if (waiting_.empty()) {
    ++free_;
    return;
  }
  // The turn goes to the first of those that wait, not to who is quicker.
  Waiter* const next = waiting_.front();
  waiting_.pop_front();
  next->may_begin = true;
  // Under the lock: the waiter is gone as soon as it sees it.
  next->changed.NotifyOne();
}

int Turns::waiting_count() const {
  const MutexLock lock(mutex_);
  return static_cast<int>(waiting_.size());
}

}  // namespace spillway
