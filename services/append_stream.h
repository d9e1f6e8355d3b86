#pragma once

#include <memory>

#include "absl/base/thread_annotations.h"
#include "host/base/mutex.h"
#include "services/call.h"
#include "services/received.h"
#include "spillway/v1/attention_service.pb.h"

namespace spillway {

// One Append call. Chunks are committed one after the other; while one is appended, the next is
// read.
class AppendStream final : public grpc::ServerReadReactor<grpc::ByteBuffer>, public OpenStream {
 public:
  AppendStream(const ServiceContext& services, const grpc::CallbackServerContext& context,
               Caller caller, v1::AppendResponse* response);

 private:
  void OnReadDone(bool ok) override;
  void OnCancel() override { cancel_->Cancel(); }
  void OnDone() override;
  void CheckIdle(Clock::time_point now) override ABSL_LOCKS_EXCLUDED(mutex_);

  // The next step: append the message that was read if no append is running; end the call if there
  // are no more messages. Decided under the lock that guards the change, because after the lock is
  // released another thread may end the call.
  enum class Step { kNothing, kAppend, kFinish };
  Step Next() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void Do(Step step) ABSL_LOCKS_EXCLUDED(mutex_);
  absl::StatusOr<AppendRequest> Parse(const v1::AppendRequest& request);
  // Adds to the error of a message that cannot be charged or parsed how many chunks were applied
  // before it.
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
  MemoryReservation reservation_;                   // charges the memory of request_
  bool waiting_ ABSL_GUARDED_BY(mutex_) = false;    // read_ is complete
  bool appending_ ABSL_GUARDED_BY(mutex_) = false;  // current_ is in the engine
  bool ended_ ABSL_GUARDED_BY(mutex_) = false;      // the client sends no more messages
  bool finished_ ABSL_GUARDED_BY(mutex_) = false;
  absl::Status status_ ABSL_GUARDED_BY(mutex_);
  absl::Status refused_ ABSL_GUARDED_BY(mutex_);  // why a message could not be charged
};

}  // namespace spillway
