#include "services/waiting_calls.h"

#include <string>
#include <vector>

#include "absl/strings/str_cat.h"

namespace spillway {
namespace {

// Answers a call and releases the reference to it. Called without a lock, because gRPC may run
// here what waits for the call.
void End(grpc_call* call, grpc_status_code code, const std::string& why) {
  grpc_call_cancel_with_status(call, code, why.c_str(), nullptr);
  grpc_call_unref(call);
}

}  // namespace

WaitingCalls::Place WaitingCalls::Add(grpc_call* call) {
  std::list<Waiting> added = {{call, Clock::now()}};
  const Place place = added.begin();
  grpc_call* oldest = nullptr;
  {
    const MutexLock lock(mutex_);
    if (calls_.size() >= count_max_) oldest = TakeOldest();
    calls_.splice(calls_.end(), added);
  }
  if (oldest != nullptr) {
    End(oldest, GRPC_STATUS_RESOURCE_EXHAUSTED,
        absl::StrCat("more than ", count_max_,
                     " calls wait for their requests, and this one has waited longest"));
  }
  return place;
}

void WaitingCalls::Remove(Place place) {
  const MutexLock lock(mutex_);
  (place->ended ? ended_ : calls_).erase(place);
}

void WaitingCalls::EndIdle(Clock::time_point now, std::chrono::duration<double> max) {
  if (max.count() == 0) return;
  std::vector<grpc_call*> idle;
  {
    const MutexLock lock(mutex_);
    while (!calls_.empty() && now - calls_.front().begin > max) idle.push_back(TakeOldest());
  }
  for (grpc_call* call : idle) {
    End(call, GRPC_STATUS_ABORTED,
        absl::StrCat("the request did not arrive within ", max.count(), " seconds"));
  }
}

grpc_call* WaitingCalls::TakeOldest() {
  const Place oldest = calls_.begin();
  oldest->ended = true;
  ended_.splice(ended_.end(), calls_, oldest);
  grpc_call_ref(oldest->call);
  return oldest->call;
}

}  // namespace spillway
