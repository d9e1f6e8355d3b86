#include "daemon/server/memory_watch.h"

#include <fcntl.h>
#include <unistd.h>

#include <array>
#include <chrono>
#include <cstdio>

#include "absl/strings/str_cat.h"
#include "daemon/server/connection_shield.h"

namespace spillway {
namespace {

using std::chrono::milliseconds;
using std::chrono::steady_clock;

// Clients can make gRPC hold some hundred MiB more in a second.
constexpr milliseconds kPeriod{50};
// How long it takes until an ended connection has given its memory back. If memory grows by so much
// meanwhile, another connection is to blame.
constexpr milliseconds kGiveBack{2000};
constexpr int64_t kGrowthBytes = int64_t{32} << 20;

}  // namespace

MemoryWatch::MemoryWatch(int64_t limit_bytes, EventLog& events)
    : statm_(open("/proc/self/statm", O_RDONLY | O_CLOEXEC)),
      bound_bytes_(limit_bytes + HeldBytes() + kAllowanceBytes),
      events_(events),
      thread_([this] { Run(); }) {}

MemoryWatch::~MemoryWatch() {
  {
    const MutexLock lock(mutex_);
    stopped_ = true;
  }
  wake_.NotifyOne();
  thread_.join();
}

int64_t MemoryWatch::HeldBytes() const {
  std::array<char, 128> text{};
  if (pread(statm_.get(), text.data(), text.size() - 1, 0) <= 0) return 0;
  long long resident = 0, shared = 0;
  if (std::sscanf(text.data(), "%*d %lld %lld", &resident, &shared) != 2) return 0;
  return (resident - shared) * sysconf(_SC_PAGESIZE);
}

void MemoryWatch::Run() {
  int64_t held_before = -kGrowthBytes;  // when the last connection was ended
  steady_clock::time_point last;
  for (;;) {
    const auto now = steady_clock::now();
    const int64_t held = HeldBytes();
    if (held > bound_bytes_ && (held > held_before + kGrowthBytes || now - last > kGiveBack)) {
      if (ConnectionShield::Get().EndBusiest("the daemon holds too much memory")) {
        events_.Warning("memory_exceeded", {{"held_bytes", absl::StrCat(held)},
                                            {"bound_bytes", absl::StrCat(bound_bytes_)}});
      }
      held_before = held;
      last = now;
    }
    if (held <= bound_bytes_) held_before = -kGrowthBytes;
    const MutexLock lock(mutex_);
    while (!stopped_ && wake_.WaitUntil(mutex_, now + kPeriod)) {
    }
    if (stopped_) return;
  }
}

}  // namespace spillway
