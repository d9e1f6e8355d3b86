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
#include "host/base/mutex.h"
#include "spillway/v1/attention_service.pb.h"

namespace spillway {

// One Decode stream: several messages are in flight, answers come in order per
// sequence. After a message that failed, its (sequence, layer) is blocked
// until one starts at the layer's length.
class DecodeStream final : public grpc::ServerBidiReactor<v1::DecodeRequest, v1::DecodeResponse> {
 public:
  DecodeStream(const ServiceContext& services, const grpc::CallbackServerContext& context);

 private:
  // One message and its answer.
  struct Message {
    // Answers come in order among those of one.
    const std::string& sequence() const { return request.sequence(); }
    size_t bytes() const { return request.ByteSizeLong() + response.ByteSizeLong(); }
    // Ready for another message, in the same memory.
    void Clear();

    v1::DecodeRequest request;
    v1::DecodeResponse response;
    MemoryReservation reservation;
    ResultPlaces places;
    bool answered = false;
  };

  void OnReadDone(bool ok) override;
  void OnWriteDone(bool ok) override;
  void OnCancel() override { cancel_->Cancel(); }
  void OnDone() override;

  void Serve(Message* message);
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
  void Fail(Message& message, const absl::Status& status) ABSL_LOCKS_EXCLUDED(mutex_);
  // The message has its answer: queue what can be written now.
  void Answered(Message* message) ABSL_LOCKS_EXCLUDED(mutex_);

  // What to start next.
  struct Step {
    bool read = false;
    Message* write = nullptr;
    bool finish = false;
    bool drained = false;
  };
  // Decided under the lock that made the change: once it is released another
  // thread may end the call and the stream with it, unless the step holds it.
  Step Next() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void Do(const Step& step) ABSL_LOCKS_EXCLUDED(mutex_);
  void Drain() ABSL_LOCKS_EXCLUDED(mutex_);

  using LayerKey = std::pair<std::string, int32_t>;

  const ServiceContext& services_;
  const std::shared_ptr<CancelToken> cancel_;

  Mutex mutex_;
  std::unique_ptr<Message> reading_;
  // In the order they came.
  std::vector<std::unique_ptr<Message>> in_flight_ ABSL_GUARDED_BY(mutex_);
  std::deque<std::unique_ptr<Message>> to_write_ ABSL_GUARDED_BY(mutex_);
  // One that was written, small and cleared: the next read's. Null: none.
  std::unique_ptr<Message> spare_ ABSL_GUARDED_BY(mutex_);
  absl::flat_hash_set<LayerKey> blocked_ ABSL_GUARDED_BY(mutex_);
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
