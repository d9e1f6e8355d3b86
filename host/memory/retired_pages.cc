#include "host/memory/retired_pages.h"

#include <utility>

namespace spillway {

RetiredPages::Work RetiredPages::Begin() {
  const MutexLock lock(mutex_);
  running_.insert(next_);
  return next_++;
}

void RetiredPages::End(Work work) {
  std::vector<Retired> released;  // after the lock
  const MutexLock lock(mutex_);
  running_.erase(work);
  while (!retired_.empty() && (running_.empty() || retired_.front().next <= *running_.begin())) {
    released.push_back(std::move(retired_.front()));
    retired_.pop_front();
  }
}

bool RetiredPages::Retire(std::vector<PageTable> tables) {
  const MutexLock lock(mutex_);
  // The tables are the caller's until it has the answer, so they are released after the lock.
  if (running_.empty()) return true;
  retired_.push_back({next_, std::move(tables)});
  return false;
}

bool RetiredPages::idle() const {
  const MutexLock lock(mutex_);
  return running_.empty();
}

}  // namespace spillway
