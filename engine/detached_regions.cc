#include "engine/detached_regions.h"

#include <iterator>

namespace spillway {

void DetachedRegions::Take(Held held) {
  {
    const MutexLock lock(mutex_);
    if (keeps_content_) return;
  }
  held.memory->Free();
  if (!held.memory->IsHeld()) return;
  const MutexLock lock(mutex_);
  held_.push_back(std::move(held));
}

void DetachedRegions::Collect() {
  std::list<Held> ended;  // freed after the lock is released
  const MutexLock lock(mutex_);
  for (auto held = held_.begin(); held != held_.end();) {
    const auto next = std::next(held);
    if (!held->memory->IsHeld()) ended.splice(ended.end(), held_, held);
    held = next;
  }
}

void DetachedRegions::KeepContent() {
  const MutexLock lock(mutex_);
  keeps_content_ = true;
}

int64_t DetachedRegions::count() const {
  const MutexLock lock(mutex_);
  return static_cast<int64_t>(held_.size());
}

}  // namespace spillway
