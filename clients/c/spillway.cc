#include "spillway.h"

#include <chrono>
#include <cstdint>
#include <deque>
#include <memory>
#include <string>

#include "grpcpp/channel.h"
#include "grpcpp/client_context.h"
#include "grpcpp/completion_queue.h"
#include "grpcpp/create_channel.h"
#include "grpcpp/generic/generic_stub.h"
#include "grpcpp/support/byte_buffer.h"
#include "grpcpp/support/channel_arguments.h"
#include "host/base/mutex.h"

namespace {

using Clock = std::chrono::system_clock;

constexpr char kMethod[] = "/spillway.v1.AttentionService/Decode";

// For ever where seconds is negative, no number, or decades.
Clock::time_point After(double seconds) {
  if (!(seconds >= 0 && seconds < 1e9)) return Clock::time_point::max();
  return Clock::now() +
         std::chrono::duration_cast<Clock::duration>(std::chrono::duration<double>(seconds));
}

std::shared_ptr<grpc::Channel> Connect(const char* target) {
  grpc::ChannelArguments arguments;
  // A daemon on this host is not behind the user's web proxy.
  arguments.SetInt(GRPC_ARG_ENABLE_HTTP_PROXY, 0);
  return grpc::CreateCustomChannel(target, grpc::InsecureChannelCredentials(), arguments);
}

}  // namespace

// gRPC's asynchronous call on a completion queue of its own. Whoever waits is
// the one that drives the queue; a second thread that waits meanwhile is told.
struct spillway_decode_stream {
 public:
  spillway_decode_stream(const char* target, double timeout_seconds) : stub_(Connect(target)) {
    if (timeout_seconds > 0) context_.set_deadline(After(timeout_seconds));
    call_ = stub_.PrepareCall(&context_, kMethod, &queue_);
    call_->StartCall(Tag(Event::kStarted));
  }

  ~spillway_decode_stream() {
    context_.TryCancel();
    queue_.Shutdown();
    void* tag;
    bool ok;
    while (queue_.Next(&tag, &ok)) {
    }
  }

  int Send(const void* message, size_t size) {
    grpc::Slice slice(message, size);
    const spillway::MutexLock lock(mutex_);
    if (broken_) return -1;
    to_write_.emplace_back(&slice, 1);
    WriteNext();
    // Mostly it is written already, and the next message need not wait.
    if (!driven_) Drive(/*deadline=*/Clock::time_point());
    return 0;
  }

  int Receive(double timeout_seconds, const void** message, size_t* size) {
    const Clock::time_point deadline = After(timeout_seconds);
    const spillway::MutexLock lock(mutex_);
    wanted_ = true;
    ReadNext();
    while (!arrived_ && !ended_) {
      if (driven_) {
        if (!changed_.WaitUntil(mutex_, deadline)) break;
      } else if (!Drive(deadline)) {
        break;
      }
    }
    if (arrived_) {
      arrived_ = false;
      wanted_ = false;
      *message = received_.begin();
      *size = received_.size();
      return SPILLWAY_RECEIVED;
    }
    return ended_ ? SPILLWAY_ENDED : SPILLWAY_TIMED_OUT;
  }

  // Constant once the stream has ended.
  const grpc::Status& status() const { return status_; }
  const std::string& message() const { return message_; }
  const std::string& details() const { return details_; }

  void Cancel() { context_.TryCancel(); }

 private:
  enum class Event : intptr_t { kStarted = 1, kWritten, kRead, kFinished };
  static void* Tag(Event event) { return reinterpret_cast<void*>(event); }

  void WriteNext() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    if (!started_ || writing_ || broken_ || to_write_.empty()) return;
    writing_ = true;
    call_->Write(to_write_.front(), Tag(Event::kWritten));
    to_write_.pop_front();
  }

  // A message is read when it is asked for: what the daemon may have in flight
  // stays bounded by what it allows.
  void ReadNext() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    if (!started_ || reading_ || arrived_ || finishing_ || !wanted_) return;
    reading_ = true;
    call_->Read(&incoming_, Tag(Event::kRead));
  }

  void Break() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    broken_ = true;
    to_write_.clear();
  }

  void Finish() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    Break();
    if (finishing_) return;
    finishing_ = true;
    call_->Finish(&status_, Tag(Event::kFinished));
  }

  // Waits for one event of the queue, without the lock; false at the deadline.
  bool Drive(Clock::time_point deadline) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    driven_ = true;
    mutex_.Unlock();
    void* tag;
    bool ok;
    const auto next = queue_.AsyncNext(&tag, &ok, deadline);
    mutex_.Lock();
    driven_ = false;
    const bool got = next == grpc::CompletionQueue::GOT_EVENT;
    if (got) Handle(static_cast<Event>(reinterpret_cast<intptr_t>(tag)), ok);
    changed_.NotifyAll();
    return got;
  }

  void Handle(Event event, bool ok) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    switch (event) {
      case Event::kStarted:
        if (!ok) return Finish();
        started_ = true;
        WriteNext();
        return ReadNext();
      case Event::kWritten:
        writing_ = false;
        // The read, which fails too, tells how the stream ended.
        if (!ok) Break();
        return WriteNext();
      case Event::kRead:
        reading_ = false;
        if (!ok) return Finish();
        if (!incoming_.DumpToSingleSlice(&received_).ok()) received_ = grpc::Slice();
        arrived_ = true;
        return;
      case Event::kFinished:
        message_ = status_.error_message();
        details_ = status_.error_details();
        ended_ = true;
        return;
    }
  }

  grpc::GenericStub stub_;
  grpc::ClientContext context_;
  grpc::CompletionQueue queue_;
  std::unique_ptr<grpc::GenericClientAsyncReaderWriter> call_;

  spillway::Mutex mutex_;
  spillway::CondVar changed_;
  std::deque<grpc::ByteBuffer> to_write_ ABSL_GUARDED_BY(mutex_);
  grpc::ByteBuffer incoming_ ABSL_GUARDED_BY(mutex_);
  grpc::Slice received_ ABSL_GUARDED_BY(mutex_);  // the last message that was given
  // Read without the lock once the stream has ended.
  grpc::Status status_;
  std::string message_;
  std::string details_;
  bool driven_ ABSL_GUARDED_BY(mutex_) = false;   // a thread waits for the queue
  bool started_ ABSL_GUARDED_BY(mutex_) = false;  // reads and writes may begin
  bool writing_ ABSL_GUARDED_BY(mutex_) = false;
  bool reading_ ABSL_GUARDED_BY(mutex_) = false;
  bool wanted_ ABSL_GUARDED_BY(mutex_) = false;   // a message, by a receive that waits or gave up
  bool arrived_ ABSL_GUARDED_BY(mutex_) = false;  // and it is in received_
  bool broken_ ABSL_GUARDED_BY(mutex_) = false;   // nothing can be written any more
  bool finishing_ ABSL_GUARDED_BY(mutex_) = false;
  bool ended_ ABSL_GUARDED_BY(mutex_) = false;
};

int spillway_interface() { return SPILLWAY_INTERFACE; }

spillway_decode_stream* spillway_decode_open(const char* target, double timeout_seconds) {
  return new spillway_decode_stream(target, timeout_seconds);
}

int spillway_decode_send(spillway_decode_stream* stream, const void* message, size_t size) {
  return stream->Send(message, size);
}

int spillway_decode_receive(spillway_decode_stream* stream, double timeout_seconds,
                            const void** message, size_t* size) {
  return stream->Receive(timeout_seconds, message, size);
}

int spillway_decode_status(spillway_decode_stream* stream, const char** message,
                           const void** details, size_t* details_size) {
  *message = stream->message().c_str();
  *details = stream->details().data();
  *details_size = stream->details().size();
  return stream->status().error_code();
}

void spillway_decode_cancel(spillway_decode_stream* stream) { stream->Cancel(); }

void spillway_decode_close(spillway_decode_stream* stream) { delete stream; }
