#include "lib/call.h"

#include <utility>

#include "absl/time/time.h"

namespace spillway {
namespace {

constexpr absl::Duration kEndWait = absl::Milliseconds(100);

// Calls that were abandoned and are not over, as a list.
struct Unended {
  Mutex mutex;
  spillway_call* first ABSL_GUARDED_BY(mutex) = nullptr;

  void Add(spillway_call* call) ABSL_LOCKS_EXCLUDED(mutex) {
    const MutexLock lock(mutex);
    call->next_unended = first;
    first = call;
  }
  spillway_call* TakeAll() ABSL_LOCKS_EXCLUDED(mutex) {
    const MutexLock lock(mutex);
    return std::exchange(first, nullptr);
  }
};

Unended& AllUnended() {
  // Never destroyed, because gRPC still uses what is in it.
  static Unended* const unended = new Unended;
  return *unended;
}

void EndOrKeep(spillway_call* call, SteadyTime deadline) {
  if (call->IsOver(deadline)) {
    delete call;
  } else {
    AllUnended().Add(call);
  }
}

}  // namespace

void CallEnder::operator()(spillway_call* call) const {
  spillway_call* earlier = AllUnended().TakeAll();
  while (earlier != nullptr) {
    EndOrKeep(std::exchange(earlier, earlier->next_unended), SteadyTime());
  }
  call->Abandon();
  EndOrKeep(call, After(SteadyNow(), kEndWait));
}

}  // namespace spillway
