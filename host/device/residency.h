#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <list>
#include <utility>

#include "absl/base/thread_annotations.h"
#include "absl/time/time.h"
#include "host/base/mutex.h"
#include "host/base/steady_time.h"
#include "host/device/copy_layers.h"

namespace spillway {

// Decides which sequences keep a copy of all their rows in a device's memory, if not all copies
// fit. A sequence that grows takes the room of the sequence that has been idle the longest. A
// sequence without a copy gets one once its attends have moved as many bytes over the link as the
// copy has, so that copying never costs more than the reads that it replaces have cost.
// Thread-safe.
class Residency {
 public:
  // A sequence that has not been used for this long makes room for others.
  static constexpr absl::Duration kIdle = absl::Milliseconds(300);

  // One sequence. Must live until Remove().
  class Member {
   public:
    virtual ~Member() = default;
    // Frees the room of all rows; they are still in host memory. Called while this member is not in
    // use, in the thread of another member, which holds the lock of Residency.
    virtual void GiveUp() = 0;
    // Bytes of that room.
    virtual int64_t held_bytes() const = 0;
    // Pages that a layer's copy may need before the sequence is prepared again. 0 if its layers
    // are not those of `of`.
    virtual int64_t AheadPages(const CopyLayers& of) const = 0;

   private:
    friend class Residency;
    std::list<Member*>::iterator place_;
    // Leaves and becomes 0 only under the lock, so that a use within another one takes none.
    std::atomic<int> use_count_ = 0;
    SteadyTime last_used_;
    // Over the link, since TakeTurn() was last true or GiveUp() called.
    std::atomic<int64_t> moved_bytes_ = 0;
  };

  using Clock = std::function<SteadyTime()>;
  explicit Residency(Clock now = SteadyNow) : now_(std::move(now)) {}
  Residency(const Residency&) = delete;
  Residency& operator=(const Residency&) = delete;

  void Add(Member& member) ABSL_LOCKS_EXCLUDED(mutex_);
  // Waits until a GiveUp() of the member that is running has returned.
  void Remove(Member& member) ABSL_LOCKS_EXCLUDED(mutex_);

  // From Begin() to End(), the member is in use, and GiveUp() is not called. Uses may nest.
  void Begin(Member& member) ABSL_LOCKS_EXCLUDED(mutex_);
  void End(Member& member) ABSL_LOCKS_EXCLUDED(mutex_);

  // Makes one member give up its room: of those that hold something, the one that has been idle the
  // longest. False: all others that hold something are in use, or were used less than `idle` ago.
  bool MakeRoom(absl::Duration idle = kIdle) ABSL_LOCKS_EXCLUDED(mutex_);

  // The sum of AheadPages() over the members that are in use, or were less than kIdle ago.
  int64_t AheadPages(const CopyLayers& of) ABSL_LOCKS_EXCLUDED(mutex_);

  // Counts bytes of a member's rows that came over the link.
  static void CountMoved(Member& member, int64_t bytes) {
    member.moved_bytes_.fetch_add(bytes, std::memory_order_relaxed);
  }
  // Starts again at 0, because the member has given its room up by itself.
  static void ForgetMoved(Member& member) {
    member.moved_bytes_.store(0, std::memory_order_relaxed);
  }
  // Whether at least row_bytes were counted.
  static bool HasMoved(const Member& member, int64_t row_bytes) {
    return member.moved_bytes_.load(std::memory_order_relaxed) >= row_bytes;
  }
  // The same. If so, the count starts again at 0.
  bool TakeTurn(Member& member, int64_t row_bytes) ABSL_LOCKS_EXCLUDED(mutex_);

 private:
  const Clock now_;
  Mutex mutex_;
  std::list<Member*> members_ ABSL_GUARDED_BY(mutex_);  // least recently used first
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
