#include "clients/c/call.h"

#include <utility>

namespace spillway {
namespace {

constexpr absl::Duration kEndWait = absl::Milliseconds(100);

// Calls that were abandoned and are not over.
struct Unended {
  Mutex mutex;
  std::vector<spillway_call*> calls ABSL_GUARDED_BY(mutex);
};

Unended& AllUnended() {
  // Never destroyed, because gRPC still uses what is in it.
  static Unended* const unended = new Unended;
  return *unended;
}

}  // namespace

void CallEnder::operator()(spillway_call* call) const {
  call->Abandon();
  Unended& unended = AllUnended();
  std::vector<spillway_call*> left;
  {
    const MutexLock lock(unended.mutex);
    left.swap(unended.calls);
  }
  std::erase_if(left, [](spillway_call* earlier) {
    const bool over = earlier->IsOver(SteadyTime());
    if (over) delete earlier;
    return over;
  });
  if (call->IsOver(After(SteadyNow(), kEndWait))) {
    delete call;
  } else {
    left.push_back(call);
  }
  const MutexLock lock(unended.mutex);
  unended.calls.insert(unended.calls.end(), left.begin(), left.end());
}

}  // namespace spillway
