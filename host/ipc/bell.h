#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>

namespace spillway {

// A number in memory that two processes share: one of them changes it, one thread
// of the other waits for that. Only who waits for it is at its changer's mercy.
struct alignas(64) Bell {
  std::atomic<uint32_t> number;
  // Set by who waits when it sleeps and must be woken.
  std::atomic<uint32_t> asleep;

  // Everything written before is seen by who then finds the new number.
  void Ring(uint32_t next);
  // Wakes who sleeps, who looks at the number again. For who is not its changer.
  void Wake();
};
static_assert(std::atomic<uint32_t>::is_always_lock_free);

// How one thread waits for bells: it spins as long as recent waits have taken, and
// sleeps where they take longer. Of a process, one thread at a time spins, and none
// where the machine has fewer than four hardware threads. Not thread-safe.
class BellWaiter {
 public:
  using Clock = std::chrono::steady_clock;
  static constexpr std::chrono::nanoseconds kSpinMax = std::chrono::microseconds(50);

  // Returns once the number is not `seen`: true; or no earlier than the deadline,
  // or when it was woken, false. may_spin: else it sleeps at once.
  bool Await(Bell& bell, uint32_t seen, Clock::time_point deadline, bool may_spin = true);

  // What the next wait spins at most.
  std::chrono::nanoseconds spin() const { return spin_; }
  // Spins so long at most from now on, in place of kSpinMax: for waits that are expected to
  // take longer and are worth a core.
  void SetSpinMax(std::chrono::nanoseconds most) { spin_ = spin_max_ = most; }
  // Takes note of how long a wait took. Called by Await().
  void Learn(std::chrono::nanoseconds waited);

 private:
  std::chrono::nanoseconds spin_max_ = kSpinMax;
  std::chrono::nanoseconds spin_ = kSpinMax;
};

}  // namespace spillway
