#pragma once

#include <memory>
#include <optional>

#include "absl/base/thread_annotations.h"
#include "host/base/mutex.h"
#include "services/call.h"
#include "services/convert/tensor.h"
#include "services/fetch_choice.h"
#include "spillway/v1/attention_service.pb.h"

namespace spillway {

// One FetchPages call. When it is the request's turn in the sequence, the rows are shared. Then
// they are streamed at the client's pace, or written to the client's targets, while the sequence
// continues. If `request` is an error, the call ends with it. A client that reads nothing for too
// long is cut off.
class FetchStream final : public grpc::ServerWriteReactor<v1::FetchPagesResponse>,
                          public OpenStream {
 public:
  FetchStream(const ServiceContext& services, grpc::CallbackServerContext& context, Caller caller,
              const absl::StatusOr<const v1::FetchPagesRequest*>& request);

 private:
  void OnWriteDone(bool ok) override ABSL_LOCKS_EXCLUDED(mutex_);
  void CheckIdle(Clock::time_point now) override ABSL_LOCKS_EXCLUDED(mutex_);
  void OnCancel() override { cancel_->Cancel(); }
  void OnDone() override;

  absl::Status Start(const v1::FetchPagesRequest& request);
  // Reads the targets of the rows from the request, if there are any.
  absl::Status ParseTargets(const v1::FetchPagesRequest& request);
  // Lets the device write the rows to the targets, then ends the call.
  void CopyRows(SharedRows shared);
  // Writes the next rows, or ends the call.
  void WriteNext() ABSL_LOCKS_EXCLUDED(mutex_);

  const ServiceContext& services_;
  grpc::CallbackServerContext& context_;
  const Caller caller_;
  const std::shared_ptr<CancelToken> cancel_;
  std::shared_ptr<Model> model_;
  FetchChoice choice_;
  std::optional<LayerRows> rows_;
  int head_ = 0;
  int64_t row_ = 0;  // the next row of head_
  // Targets for the rows, if the request has any.
  std::optional<TensorTarget> k_;
  std::optional<TensorTarget> v_;
  std::optional<FetchWork> work_;
  MemoryReservation reservation_;
  v1::FetchPagesResponse response_;

  Mutex mutex_;
  bool writing_ ABSL_GUARDED_BY(mutex_) = false;  // a write waits for the client
  IdleTime idle_ ABSL_GUARDED_BY(mutex_);
  grpc::Status cut_off_ ABSL_GUARDED_BY(mutex_);  // the reason if the client was cut off
};

}  // namespace spillway
