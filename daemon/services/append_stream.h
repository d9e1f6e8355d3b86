#pragma once

#include <memory>

#include "absl/base/thread_annotations.h"
#include "daemon/services/call.h"
#include "daemon/services/received.h"
#include "host/base/mutex.h"
#include "spillway/v1/attention_service.pb.h"

namespace spillway {

// One Append: chunks are committed one after the other; the next is read while
// one is being appended.
class AppendStream final : public grpc::ServerReadReactor<grpc::ByteBuffer>, public OpenStream {
 public:
  AppendStream(const ServiceContext& services, const grpc::CallbackServerContext& context,
               Caller caller, v1::AppendResponse* response);

 private:
  void OnReadDone(bool ok) override;
  void OnCancel() override { cancel_->Cancel(); }
  void OnDone() override;
  void CheckIdle(Clock::time_point now) override ABSL_LOCKS_EXCLUDED(mutex_);

  // What to do next: append what was read, if nothing is being appended; end
  // the call when there is no more. Decided under the lock that made the
  // change: once it is released another thread may end the call.
  enum class Step { kNothing, kAppend, kFinish };
  Step Next() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void Do(Step step) ABSL_LOCKS_EXCLUDED(mutex_);
  absl::StatusOr<AppendRequest> Parse(const v1::AppendRequest& request);
  // The error of a message that cannot be read, with what was applied before it.
  absl::Status WithProgress(const absl::Status& status) const;
  void OnAppended(absl::StatusOr<AppendOutcome> outcome) ABSL_LOCKS_EXCLUDED(mutex_);

  const ServiceContext& services_;
  const Caller caller_;
  v1::AppendResponse* const response_;
  const std::shared_ptr<CancelToken> cancel_;

  Mutex mutex_;
  IdleTime idle_ ABSL_GUARDED_BY(mutex_);
  grpc::ByteBuffer read_;  // being read, or read and waiting
  MemoryReservation read_reservation_;
  grpc::ByteBuffer current_;                        // being appended
  v1::AppendRequest request_;                       // current_, parsed
  MemoryReservation reservation_;                   // of the memory that request_ has
  bool waiting_ ABSL_GUARDED_BY(mutex_) = false;    // read_ is complete
  bool appending_ ABSL_GUARDED_BY(mutex_) = false;  // current_ is in the engine
  bool ended_ ABSL_GUARDED_BY(mutex_) = false;      // the client sends no more
  bool finished_ ABSL_GUARDED_BY(mutex_) = false;
  absl::Status status_ ABSL_GUARDED_BY(mutex_);
  absl::Status refused_ ABSL_GUARDED_BY(mutex_);  // of the message after all that was appended
};

}  // namespace spillway
