#pragma once

#include <memory>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "host/base/mutex.h"
#include "services/call.h"
#include "services/received.h"
#include "spillway/v1/model_service.pb.h"

namespace spillway {

// One upload of hash weights. Collects the file, then passes it to the engine. A model takes one
// upload at a time.
class UploadStream final : public grpc::ServerReadReactor<grpc::ByteBuffer>, public OpenStream {
 public:
  UploadStream(const ServiceContext& services, const grpc::CallbackServerContext& context,
               Caller caller, v1::UploadHashWeightsResponse* response);

 private:
  void OnReadDone(bool ok) override ABSL_LOCKS_EXCLUDED(mutex_);
  void OnCancel() override { cancel_->Cancel(); }
  void OnDone() override;
  void CheckIdle(Clock::time_point now) override ABSL_LOCKS_EXCLUDED(mutex_);

  void Read() ABSL_LOCKS_EXCLUDED(mutex_);
  // Handles the message that was read.
  absl::Status Take();
  absl::Status Begin(const v1::UploadHashWeightsRequest& request);
  void Complete();
  // Frees everything that the upload holds, and ends the call.
  void End(const absl::Status& status);

  const ServiceContext& services_;
  const Caller caller_;
  v1::UploadHashWeightsResponse* const response_;
  const std::shared_ptr<CancelToken> cancel_;
  grpc::ByteBuffer received_;
  std::shared_ptr<Model> model_;
  bool owns_upload_ = false;  // this stream has set model_->uploading
  // Both charge the bytes that have arrived.
  MemoryReservation reservation_;
  AccountCharge charge_;
  std::vector<std::byte> file_;
  int64_t total_bytes_ = 0;

  Mutex mutex_;
  // A read waits for the client. The thread that sets it to false owns the members above, and
  // either ends the stream or reads again.
  bool reading_ ABSL_GUARDED_BY(mutex_) = false;
  IdleTime idle_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace spillway
