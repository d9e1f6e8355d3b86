#pragma once

#include <memory>
#include <optional>
#include <string>

#include "absl/base/thread_annotations.h"
#include "engine/account_charge.h"
#include "engine/step.h"
#include "host/base/mutex.h"
#include "services/call.h"
#include "services/convert/decode_step.h"
#include "services/received.h"
#include "spillway/v1/attention_service.pb.h"

namespace spillway {

// One Step stream. Messages are served one after the other; while one is served, the next is read.
class StepCall final : public grpc::ServerBidiReactor<grpc::ByteBuffer, v1::StepResponse>,
                       public OpenStream {
 public:
  StepCall(const ServiceContext& services, grpc::CallbackServerContext& context, Caller caller);

 private:
  // Tensors of a layer of which the first `part_count` parts have arrived, in C order.
  struct Inputs {
    int layer = 0;
    int part_count = 0;
    DType q_dtype = DType::kF32;
    DType out_dtype = DType::kF32;
    std::string q, k, v;
    MemoryReservation reservation;
    AccountCharge charge;
  };
  // What is left to answer for a layer.
  struct Outputs {
    int layer = 0;
    DType dtype = DType::kF32;
    google::rpc::Status status;
    v1::AttendResponse results;  // without tensors, of all parts; empty: the layer was refused
    std::string out, lse;
    int answered_count = 0;  // parts
    MemoryReservation reservation;
    AccountCharge charge;
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
  // A client that has begun a layer must complete it, and read its answers.
  void CheckIdle(Clock::time_point now) override ABSL_LOCKS_EXCLUDED(mutex_);

  // Serves the message in current_. The functions that follow belong to it: at any time, one thread
  // is in one of them. nullopt: it is answered, and OnWriteDone goes on. Otherwise it is served; an
  // error ends the stream.
  std::optional<absl::Status> Serve();
  void Begin(const v1::DecodeStep& message, const absl::Status& charged);
  // Adds the tensors of a message to inputs_. reservation: charges the message.
  absl::Status Collect(v1::StepAttend& message, MemoryReservation reservation);
  // Charges memory for the parts of a layer that take several messages.
  absl::Status MakeRoom();
  void Attend();
  void OnAttended(const absl::Status& status);
  // Answers that a layer was refused.
  void Refuse(int layer, const absl::Status& status);
  // Writes the next message of the answer.
  void Write() ABSL_LOCKS_EXCLUDED(mutex_);

  // Bytes of one part in an answer, at most.
  int64_t AnswerBytes(DType out_dtype) const;
  // Reserves and charges memory for tensors that are larger than a message.
  absl::Status Charge(int64_t bytes, MemoryReservation& reservation, AccountCharge& charge);

  const ServiceContext& services_;
  grpc::CallbackServerContext& context_;
  const Caller caller_;
  const std::shared_ptr<CancelToken> cancel_;
  const CallTimer timer_;

  // Of the message that is served.
  grpc::ByteBuffer current_;
  absl::StatusOr<MemoryReservation> current_reservation_;
  v1::StepRequest request_;
  std::unique_ptr<Step> step_;
  absl::Status begun_;  // why there is no step
  std::string trace_ = caller_.trace();
  Inputs inputs_;
  // The layer that was refused last: its remaining parts are dropped.
  std::optional<int> refused_layer_;
  Outputs outputs_;
  v1::StepResponse answer_;
  int64_t served_count_ = 0;  // messages

  Mutex mutex_;
  grpc::ByteBuffer read_;  // being read, or read and waiting
  absl::StatusOr<MemoryReservation> read_reservation_ ABSL_GUARDED_BY(mutex_);
  bool reading_ ABSL_GUARDED_BY(mutex_) = false;
  int starting_read_count_ ABSL_GUARDED_BY(mutex_) =
      0;                                          // reads that are decided on, but not started
  bool waiting_ ABSL_GUARDED_BY(mutex_) = false;  // read_ is complete
  bool busy_ ABSL_GUARDED_BY(mutex_) = false;     // a message is being served
  bool writing_ ABSL_GUARDED_BY(mutex_) = false;
  bool partial_ ABSL_GUARDED_BY(mutex_) = false;  // some parts of a layer have arrived
  bool closed_ ABSL_GUARDED_BY(mutex_) = false;   // the client sends no more messages
  bool broken_ ABSL_GUARDED_BY(mutex_) = false;   // a write has failed
  bool draining_ ABSL_GUARDED_BY(mutex_) = false;
  bool finished_ ABSL_GUARDED_BY(mutex_) = false;
  absl::Status end_ ABSL_GUARDED_BY(mutex_);  // an error that ends the stream
  IdleTime idle_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace spillway
