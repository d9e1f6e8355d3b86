#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>

namespace spillway {

// A number in memory that two processes share. One of them changes it, and one thread of the other
// waits for changes. A faulty changer disturbs only that thread.
struct alignas(64) Bell {
  std::atomic<uint32_t> number;
  // Set by the waiting thread while it sleeps and must be woken.
  std::atomic<uint32_t> asleep;

  // Sets the number, and wakes the waiting thread if it sleeps. A thread that sees the new number
  // also sees all earlier writes.
  void Ring(uint32_t next);
  // Wakes the waiting thread without changing the number. Any thread may call it.
  void Wake();
};
static_assert(std::atomic<uint32_t>::is_always_lock_free);

// How one thread waits for bells: it spins for about as long as recent waits took, and sleeps if
// they took longer. At most one thread of a process spins at a time, and none on machines with
// fewer than four hardware threads. Not thread-safe.
class BellWaiter {
 public:
  using Clock = std::chrono::steady_clock;
  static constexpr std::chrono::nanoseconds kSpinMax = std::chrono::microseconds(50);

  // Waits until the number differs from `seen`, and returns true. Returns false at the deadline, or
  // if woken without a change (Wake(), a signal). If may_spin is false, the thread sleeps at once.
  bool Await(Bell& bell, uint32_t seen, Clock::time_point deadline, bool may_spin = true);

  // The longest that the next wait may spin.
  std::chrono::nanoseconds spin() const { return spin_; }
  // Sets the longest spin, in place of kSpinMax: for longer waits that are worth a core.
  void SetSpinMax(std::chrono::nanoseconds most) { spin_ = spin_max_ = most; }
  // Records how long a wait took. Called by Await().
  void Learn(std::chrono::nanoseconds waited);

 private:
  std::chrono::nanoseconds spin_max_ = kSpinMax;
  std::chrono::nanoseconds spin_ = kSpinMax;
};

}  // namespace spillway
