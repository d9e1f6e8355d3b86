#include "host/ipc/bell.h"

#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <climits>
#include <ctime>
#include <thread>

namespace spillway {
namespace {

using std::chrono::nanoseconds;

constexpr unsigned kThreadsToSpinMin = 4;

// Whether a thread of this process spins.
std::atomic<bool> spinning = false;

bool MaySpin() {
  static const bool enough = std::thread::hardware_concurrency() >= kThreadsToSpinMin;
  return enough && !spinning.exchange(true, std::memory_order_acquire);
}

void Pause() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

// Not FUTEX_PRIVATE: the other side is another process.
long Futex(std::atomic<uint32_t>& word, int operation, uint32_t value, const timespec* timeout) {
  static_assert(sizeof(word) == sizeof(uint32_t));
  return syscall(SYS_futex, &word, operation, value, timeout, nullptr, 0);
}

}  // namespace

void Bell::Ring(uint32_t next) {
  // Sequentially consistent, like `asleep`: either this thread sees that the other one sleeps, or
  // the other one sees the new number.
  number.store(next);
  if (asleep.load() != 0) Wake();
}

void Bell::Wake() { Futex(number, FUTEX_WAKE, INT_MAX, nullptr); }

bool BellWaiter::Await(Bell& bell, uint32_t seen, Clock::time_point deadline, bool may_spin) {
  if (bell.number.load(std::memory_order_acquire) != seen) {
    Learn(nanoseconds(0));
    return true;
  }
  const Clock::time_point start = Clock::now();
  if (may_spin && spin_.count() > 0 && MaySpin()) {
    const Clock::time_point end = std::min(start + spin_, deadline);
    bool changed = false;
    do {
      for (int i = 0; i < 16 && !changed; ++i) {
        Pause();
        changed = bell.number.load(std::memory_order_acquire) != seen;
      }
    } while (!changed && Clock::now() < end);
    spinning.store(false, std::memory_order_release);
    if (changed) {
      Learn(Clock::now() - start);
      return true;
    }
  }
  const nanoseconds left = deadline - Clock::now();
  if (left.count() > 0) {
    const timespec timeout = {
        std::chrono::duration_cast<std::chrono::seconds>(left).count(),
        (left % std::chrono::seconds(1)).count(),
    };
    bell.asleep.store(1);
    if (bell.number.load() == seen) Futex(bell.number, FUTEX_WAIT, seen, &timeout);
    bell.asleep.store(0);
  }
  if (bell.number.load(std::memory_order_acquire) == seen) return false;
  Learn(Clock::now() - start);
  return true;
}

void BellWaiter::Learn(nanoseconds waited) {
  // After a wait that spinning could cover, the next one spins for up to twice as long. Each longer
  // wait halves the spin time, down to nothing.
  if (waited <= spin_max_) {
    spin_ = std::min(spin_max_, std::max(2 * waited, spin_max_ / 8));
  } else {
    spin_ = spin_ > spin_max_ / 8 ? spin_ / 2 : nanoseconds(0);
  }
}

}  // namespace spillway
