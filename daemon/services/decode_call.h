#pragma once

#include <deque>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/container/flat_hash_set.h"
#include "daemon/convert/attend.h"
#include "daemon/services/call.h"
#include "daemon/services/received.h"
#include "host/base/mutex.h"
#include "spillway/v1/attention_service.pb.h"

namespace spillway {

// One Decode stream. Several messages may be in flight; within each sequence, the answers come in
// the order of the messages. After a message failed, its (sequence, layer) is blocked until a
// message appends at the layer's length.
class DecodeCall final : public grpc::ServerBidiReactor<grpc::ByteBuffer, v1::DecodeResponse>,
                         public OpenStream {
 public:
  DecodeCall(const ServiceContext& services, const grpc::CallbackServerContext& context,
             Caller caller);

 private:
  // One message and its answer.
  struct Message {
    // Answers of the same sequence are written in order.
    const std::string& sequence() const { return request.sequence(); }
    // Prepares for another message that reuses the memory.
    void Clear();
    // Frees everything that the answer with an error does not need.
    void DropContents();

    grpc::ByteBuffer received;  // emptied when parsed
    int64_t received_bytes = 0;
    v1::DecodeRequest request;
    v1::DecodeResponse response;
    MemoryReservation request_reservation;
    MemoryReservation result_reservation;
    ResultPlaces places;
    std::string trace;  // empty: the stream's trace
    bool answered = false;
  };

  void OnReadDone(bool ok) override;
  void OnWriteDone(bool ok) override;
  void OnCancel() override { cancel_->Cancel(); }
  void OnDone() override;

  // Charges and parses the message. An error that is returned ends the stream, because a message
  // that does not parse cannot be answered. An error in `refusal`, RESOURCE_EXHAUSTED, is the
  // answer to this message only.
  absl::Status Open(Message& message, absl::Status& refusal);
  void Serve(Message* message, const absl::Status& refusal);
  // Converts and checks a message. Fails if the sequence does not exist. For any other error it
  // sets `problem`, and returns an item that only waits for its turn: the error is answered, and
  // blocks its layer, in order too.
  absl::StatusOr<AttendItem> Parse(Message& message, absl::Status& problem);
  absl::Status CheckMessage(Message& message, AttendItem& item);
  // Called when it is the message's turn: whether the message may run.
  absl::Status Admit(const Message& message, const absl::Status& problem, int64_t layer_token_count)
      ABSL_LOCKS_EXCLUDED(mutex_);
  void OnAttended(Message* message, const Sequence& sequence,
                  absl::StatusOr<AttendOutcome> outcome);
  void Fail(Message& message, const absl::Status& status);
  // The id that the log uses for the message.
  const std::string& TraceOf(const Message& message) const {
    return message.trace.empty() ? caller_.trace() : message.trace;
  }
  // Blocks the layer of the message until a message appends at its length. If there is no memory
  // left to record this, ends the stream.
  void Block(const Message& message) ABSL_LOCKS_EXCLUDED(mutex_);
  // The message has its answer. Queues all answers of its sequence that can be written now.
  void Answered(Message* message) ABSL_LOCKS_EXCLUDED(mutex_);

  // What to start next, decided by Next().
  struct Step {
    bool read = false;
    Message* write = nullptr;
    bool finish = false;
    absl::Status status;  // for Finish()
  };
  // Decided under the lock that guards the change. After the lock is released, another thread may
  // end the call and delete the stream, unless the step itself prevents this.
  Step Next() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void Do(const Step& step) ABSL_LOCKS_EXCLUDED(mutex_);
  void Drain() override ABSL_LOCKS_EXCLUDED(mutex_);

  using LayerKey = std::pair<std::string, int32_t>;

  const ServiceContext& services_;
  const Caller caller_;
  const std::shared_ptr<CancelToken> cancel_;
  const CallTimer timer_;

  Mutex mutex_;
  std::unique_ptr<Message> reading_;
  // In the order of arrival.
  std::vector<std::unique_ptr<Message>> in_flight_ ABSL_GUARDED_BY(mutex_);
  std::deque<std::unique_ptr<Message>> to_write_ ABSL_GUARDED_BY(mutex_);
  // A small message that was written and cleared, for the next read. Null: none.
  std::unique_ptr<Message> spare_ ABSL_GUARDED_BY(mutex_);
  absl::flat_hash_set<LayerKey> blocked_ ABSL_GUARDED_BY(mutex_);
  MemoryReservation blocked_reservation_ ABSL_GUARDED_BY(mutex_);
  int64_t read_count_ = 0;                              // messages that were parsed
  absl::Status end_ ABSL_GUARDED_BY(mutex_);            // why no more messages are read
  int message_count_ ABSL_GUARDED_BY(mutex_) = 0;       // read, but answer not yet written
  bool read_active_ ABSL_GUARDED_BY(mutex_) = false;    // reading, or message not yet served
  bool read_starting_ ABSL_GUARDED_BY(mutex_) = false;  // a read is decided on, but not started
  bool write_active_ ABSL_GUARDED_BY(mutex_) = false;
  bool ended_ ABSL_GUARDED_BY(mutex_) = false;   // no more messages are read
  bool broken_ ABSL_GUARDED_BY(mutex_) = false;  // a write has failed
  bool draining_ ABSL_GUARDED_BY(mutex_) = false;
  bool finished_ ABSL_GUARDED_BY(mutex_) = false;
};

}  // namespace spillway
