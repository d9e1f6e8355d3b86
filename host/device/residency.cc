#include "host/device/residency.h"

namespace spillway {

void Residency::Add(Member& member) {
  const MutexLock lock(mutex_);
  member.last_used_ = now_();
  member.place_ = members_.insert(members_.end(), &member);
}

void Residency::Remove(Member& member) {
  const MutexLock lock(mutex_);
  members_.erase(member.place_);
}

void Residency::Begin(Member& member) {
  for (int uses = member.use_count_.load(); uses > 0;) {
    if (member.use_count_.compare_exchange_weak(uses, uses + 1)) return;
  }
  const MutexLock lock(mutex_);
  ++member.use_count_;
}

void Residency::End(Member& member) {
  for (int uses = member.use_count_.load(); uses > 1;) {
    if (member.use_count_.compare_exchange_weak(uses, uses - 1)) return;
  }
  const MutexLock lock(mutex_);
  if (--member.use_count_ > 0) return;
  member.last_used_ = now_();
  members_.splice(members_.end(), members_, member.place_);
}

bool Residency::MakeRoom(absl::Duration idle) {
  const MutexLock lock(mutex_);
  const SteadyTime now = now_();
  for (Member* const member : members_) {
    if (now < After(member->last_used_, idle)) return false;
    if (member->use_count_ > 0 || member->held_bytes() == 0) continue;
    member->GiveUp();
    member->moved_bytes_ = 0;
    return true;
  }
  return false;
}

int64_t Residency::AheadPages(const CopyLayers& of) {
  const MutexLock lock(mutex_);
  const SteadyTime now = now_();
  int64_t pages = 0;
  for (const Member* const member : members_) {
    const bool is_idle = member->use_count_ == 0 && now >= After(member->last_used_, kIdle);
    if (!is_idle) pages += member->AheadPages(of);
  }
  return pages;
}

bool Residency::TakeTurn(Member& member, int64_t row_bytes) {
  const MutexLock lock(mutex_);
  if (!HasMoved(member, row_bytes)) return false;
  member.moved_bytes_ = 0;
  return true;
}

}  // namespace spillway
