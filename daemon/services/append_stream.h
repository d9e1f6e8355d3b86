#pragma once

#include <memory>

#include "absl/base/thread_annotations.h"
#include "daemon/services/call.h"
#include "host/base/mutex.h"
#include "spillway/v1/attention_service.pb.h"

namespace spillway {

// One Append: chunks are committed one after the other; the next is read while
// one is being appended.
class AppendStream final : public grpc::ServerReadReactor<v1::AppendRequest> {
 public:
  AppendStream(const ServiceContext& services, const grpc::CallbackServerContext& context,
               v1::AppendResponse* response);

 private:
  void OnReadDone(bool ok) override;
  void OnCancel() override { cancel_->Cancel(); }
  void OnDone() override { delete this; }

  // What to do next: append what was read, if nothing is being appended; end
  // the call when there is no more. Decided under the lock that made the
  // change: once it is released another thread may end the call.
  enum class Step { kNothing, kAppend, kFinish };
  Step Next() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void Do(Step step);
  absl::StatusOr<AppendRequest> Parse(const v1::AppendRequest& request);
  void OnAppended(absl::StatusOr<AppendOutcome> outcome);

  const ServiceContext& services_;
  v1::AppendResponse* const response_;
  const std::shared_ptr<CancelToken> cancel_;

  Mutex mutex_;
  v1::AppendRequest read_;     // being read, or read and waiting
  v1::AppendRequest current_;  // being appended
  MemoryReservation reservation_;
  bool waiting_ ABSL_GUARDED_BY(mutex_) = false;    // read_ is complete
  bool appending_ ABSL_GUARDED_BY(mutex_) = false;  // current_ is in the engine
  bool ended_ ABSL_GUARDED_BY(mutex_) = false;      // the client sends no more
  bool finished_ ABSL_GUARDED_BY(mutex_) = false;
  absl::Status status_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace spillway
