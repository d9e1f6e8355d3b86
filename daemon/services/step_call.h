#pragma once

#include <deque>
#include <memory>
#include <string>

#include "absl/base/thread_annotations.h"
#include "daemon/convert/decode_step.h"
#include "daemon/engine/step.h"
#include "daemon/services/call.h"
#include "daemon/services/received.h"
#include "host/base/mutex.h"
#include "spillway/v1/attention_service.pb.h"

namespace spillway {

// One Step stream. Messages are served one after the other; while one is served, the next is read.
class StepCall final : public grpc::ServerBidiReactor<grpc::ByteBuffer, v1::StepResponse>,
                       public OpenStream {
 public:
  StepCall(const ServiceContext& services, const grpc::CallbackServerContext& context,
           Caller caller);

 private:
  // Tensors of a layer of which the first `part_count` parts have arrived, in C order.
  struct Inputs {
    int layer = 0;
    int part_count = 0;
    DType q_dtype = DType::kF32;
    DType out_dtype = DType::kF32;
    std::string q, k, v;
    MemoryReservation reservation;
  };
  struct Outputs {
    std::string out, lse;
    MemoryReservation reservation;
  };

  void OnReadDone(bool ok) override;
  void OnWriteDone(bool ok) override;
  void OnCancel() override { cancel_->Cancel(); }
  void OnDone() override;

  // What to do next. Decided under the lock that guards the change. After the lock is released,
  // another thread may end the call and delete the stream, unless a message is being served or a
  // read is about to start.
  struct Action {
    bool read = false;
    bool serve = false;
    bool finish = false;
    absl::Status status;  // for Finish()
  };
  Action Next() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void Do(Action action) ABSL_LOCKS_EXCLUDED(mutex_);
  void Drain() override ABSL_LOCKS_EXCLUDED(mutex_);

  // Serves the message in current_. The functions that follow belong to it: at any time, one thread
  // is in one of them, and it ends with Served().
  void Serve();
  // end: an error ends the stream.
  void Served(const absl::Status& end) ABSL_LOCKS_EXCLUDED(mutex_);
  absl::Status Begin(const v1::DecodeStep& message);
  // Adds the tensors of a message to inputs_. reservation: charges the message.
  absl::Status Collect(v1::StepAttend& message, MemoryReservation reservation);
  void Attend();
  void OnAttended(const absl::Status& status);
  // Answers that a layer was refused.
  void Refuse(int layer, const absl::Status& status);
  void Write();

  // Bytes of one part in an answer, at most.
  int64_t AnswerBytes(DType out_dtype) const;

  const ServiceContext& services_;
  const Caller caller_;
  const std::shared_ptr<CancelToken> cancel_;
  const CallTimer timer_;

  // Of the message that is served.
  grpc::ByteBuffer current_;
  v1::StepRequest request_;
  std::unique_ptr<Step> step_;
  absl::Status begun_;  // why there is no step
  std::string trace_ = caller_.trace();
  Inputs inputs_;
  Outputs outputs_;
  std::deque<v1::StepResponse> answers_;
  int64_t served_count_ = 0;  // messages

  Mutex mutex_;
  grpc::ByteBuffer read_;  // being read, or read and waiting
  bool reading_ ABSL_GUARDED_BY(mutex_) = false;
  bool read_starting_ ABSL_GUARDED_BY(mutex_) = false;  // a read is decided on, but not started
  bool waiting_ ABSL_GUARDED_BY(mutex_) = false;        // read_ is complete
  bool busy_ ABSL_GUARDED_BY(mutex_) = false;           // a message is being served
  bool closed_ ABSL_GUARDED_BY(mutex_) = false;         // the client sends no more messages
  bool broken_ ABSL_GUARDED_BY(mutex_) = false;         // a write has failed
  bool draining_ ABSL_GUARDED_BY(mutex_) = false;
  bool finished_ ABSL_GUARDED_BY(mutex_) = false;
  absl::Status end_ ABSL_GUARDED_BY(mutex_);  // an error that ends the stream
};

}  // namespace spillway
