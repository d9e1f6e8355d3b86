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

// One Decode stream: several messages are in flight, answers come in order per
// sequence. After a message that failed, its (sequence, layer) is blocked
// until one starts at the layer's length.
class DecodeStream final : public grpc::ServerBidiReactor<grpc::ByteBuffer, v1::DecodeResponse>,
                           public OpenStream {
 public:
  DecodeStream(const ServiceContext& services, const grpc::CallbackServerContext& context,
               Caller caller);

 private:
  // One message and its answer.
  struct Message {
    // Answers come in order among those of one.
    const std::string& sequence() const { return request.sequence(); }
    // Ready for another message, in the same memory.
    void Clear();
    // Frees all but what an error's answer needs.
    void DropContents();

    grpc::ByteBuffer received;  // until it is parsed
    int64_t received_bytes = 0;
    v1::DecodeRequest request;
    v1::DecodeResponse response;
    MemoryReservation request_reservation;
    MemoryReservation result_reservation;
    ResultPlaces places;
    std::string trace;  // its own; empty: the stream's
    bool answered = false;
  };

  void OnReadDone(bool ok) override;
  void OnWriteDone(bool ok) override;
  void OnCancel() override { cancel_->Cancel(); }
  void OnDone() override;

  // Charges and parses what was read. The first error ends the stream: nothing can be answered
  // to a message that cannot be read. The second, RESOURCE_EXHAUSTED, is the message's own.
  absl::Status Open(Message& message, absl::Status& refusal);
  void Serve(Message* message, const absl::Status& refusal);
  // A checked message as the engine's. When the sequence exists but something
  // else is wrong, `problem` says it and the item is only good for its turn:
  // an error is answered, and blocks its layer, in order too.
  absl::StatusOr<AttendItem> Parse(Message& message, absl::Status& problem);
  absl::Status CheckMessage(Message& message, AttendItem& item);
  // The gate of a message in its turn.
  absl::Status Admit(const Message& message, const absl::Status& problem, int64_t layer_token_count)
      ABSL_LOCKS_EXCLUDED(mutex_);
  void OnAttended(Message* message, const Sequence& sequence,
                  absl::StatusOr<AttendOutcome> outcome);
  void Fail(Message& message, const absl::Status& status);
  // By what the log names it.
  const std::string& TraceOf(const Message& message) const {
    return message.trace.empty() ? caller_.trace() : message.trace;
  }
  // Blocks the message's layer until one starts at its length. Ends the stream where there is no
  // memory left to know that.
  void Block(const Message& message) ABSL_LOCKS_EXCLUDED(mutex_);
  // The message has its answer: queue what can be written now.
  void Answered(Message* message) ABSL_LOCKS_EXCLUDED(mutex_);

  // What to start next.
  struct Step {
    bool read = false;
    Message* write = nullptr;
    bool finish = false;
    absl::Status status;  // to finish with
  };
  // Decided under the lock that made the change: once it is released another
  // thread may end the call and the stream with it, unless the step holds it.
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
  // In the order they came.
  std::vector<std::unique_ptr<Message>> in_flight_ ABSL_GUARDED_BY(mutex_);
  std::deque<std::unique_ptr<Message>> to_write_ ABSL_GUARDED_BY(mutex_);
  // One that was written, small and cleared: the next read's. Null: none.
  std::unique_ptr<Message> spare_ ABSL_GUARDED_BY(mutex_);
  absl::flat_hash_set<LayerKey> blocked_ ABSL_GUARDED_BY(mutex_);
  MemoryReservation blocked_reservation_ ABSL_GUARDED_BY(mutex_);
  int64_t read_count_ = 0;                              // messages that could be read
  absl::Status end_ ABSL_GUARDED_BY(mutex_);            // why no more messages are read
  int message_count_ ABSL_GUARDED_BY(mutex_) = 0;       // read and not yet written
  bool read_active_ ABSL_GUARDED_BY(mutex_) = false;    // or its message not yet served
  bool read_starting_ ABSL_GUARDED_BY(mutex_) = false;  // decided, not yet begun
  bool write_active_ ABSL_GUARDED_BY(mutex_) = false;
  bool ended_ ABSL_GUARDED_BY(mutex_) = false;   // no more messages come
  bool broken_ ABSL_GUARDED_BY(mutex_) = false;  // nothing can be written
  bool draining_ ABSL_GUARDED_BY(mutex_) = false;
  bool finished_ ABSL_GUARDED_BY(mutex_) = false;
};

}  // namespace spillway
