#pragma once

#include <cstdint>
#include <functional>
#include <list>
#include <utility>

#include "absl/base/thread_annotations.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "host/base/mutex.h"

namespace spillway {

// Which sequences keep a copy of all their rows in a device's memory, where not
// all fit: those that are used. A sequence that grows takes the room of the one
// that has been idle for longest; one that has none gets some once its attends
// have moved as many bytes over the link as a copy of its rows has, so that
// copies cost no more than what they save has cost. Thread-safe.
class Residency {
 public:
  // Not used for so long, a sequence makes room for others.
  static constexpr absl::Duration kIdle = absl::Seconds(1);

  // One sequence. Lives until Remove().
  class Member {
   public:
    virtual ~Member() = default;
    // Gives back the room of all rows; they are still in host memory. Called by
    // the thread of another member, while this one is not in use.
    virtual void GiveUp() = 0;
    // Bytes of that room.
    virtual int64_t held_bytes() const = 0;

   private:
    friend class Residency;
    std::list<Member*>::iterator place_;
    int use_count_ = 0;
    absl::Time last_used_;
    int64_t moved_bytes_ = 0;  // since its rows were copied, or refused
  };

  using Clock = std::function<absl::Time()>;
  explicit Residency(Clock now = absl::Now) : now_(std::move(now)) {}
  Residency(const Residency&) = delete;
  Residency& operator=(const Residency&) = delete;

  void Add(Member& member) ABSL_LOCKS_EXCLUDED(mutex_);
  // Waits for a GiveUp() of it that runs.
  void Remove(Member& member) ABSL_LOCKS_EXCLUDED(mutex_);

  // Between the two nobody asks the member to give up. They may nest.
  void Begin(Member& member) ABSL_LOCKS_EXCLUDED(mutex_);
  void End(Member& member) ABSL_LOCKS_EXCLUDED(mutex_);

  // Makes the member that has been idle for longest give up, and so on until one
  // has held something. False: of the others all that hold something are in use
  // or were used less than kIdle ago.
  bool MakeRoom() ABSL_LOCKS_EXCLUDED(mutex_);

  // Counts bytes of a member's rows that came over the link.
  void CountMoved(Member& member, int64_t bytes) ABSL_LOCKS_EXCLUDED(mutex_);
  // Whether they are as many as row_bytes; they are counted anew then.
  bool TakeTurn(Member& member, int64_t row_bytes) ABSL_LOCKS_EXCLUDED(mutex_);

 private:
  const Clock now_;
  Mutex mutex_;
  std::list<Member*> members_ ABSL_GUARDED_BY(mutex_);  // the longest unused first
};

// A member is in use while this lives. Move-only.
class ResidencyUse {
 public:
  ResidencyUse(Residency& residency, Residency::Member& member)
      : residency_(&residency), member_(&member) {
    residency.Begin(member);
  }
  ResidencyUse(ResidencyUse&& other) noexcept
      : residency_(std::exchange(other.residency_, nullptr)), member_(other.member_) {}
  ResidencyUse& operator=(ResidencyUse&&) = delete;
  ~ResidencyUse() {
    if (residency_ != nullptr) residency_->End(*member_);
  }

 private:
  Residency* residency_;
  Residency::Member* member_;
};

}  // namespace spillway
