#pragma once

#include <chrono>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "grpcpp/channel.h"
#include "grpcpp/client_context.h"
#include "grpcpp/completion_queue.h"
#include "grpcpp/generic/generic_stub.h"
#include "grpcpp/support/byte_buffer.h"
#include "host/base/mutex.h"
#include "lib/deadline.h"
#include "services/convert/trace.h"
#include "spillway.h"
#include "spillway/presence.h"

// An asynchronous gRPC call with its own completion queue. The thread that waits for the call also
// drives the queue. If a second thread waits meanwhile, it waits for the first one's notification.
struct spillway_call {
 public:
  // client_id: id of the client that makes the call; empty: the call does not name a client
  // (embedded engine).
  // trace_id: id that the daemon's log shows; empty: no id.
  // when_unavailable: called in any thread if the call ends because it found no daemon.
  spillway_call(const std::shared_ptr<grpc::Channel>& channel, const char* method,
                double timeout_seconds, const std::string& client_id, const std::string& trace_id,
                std::function<void()> when_unavailable)
      : stub_(channel), when_unavailable_(std::move(when_unavailable)) {
    if (!trace_id.empty()) context_.AddMetadata(spillway::kRequestIdMetadata, trace_id);
    if (!client_id.empty()) context_.AddMetadata(spillway::kClientMetadata, client_id);
    if (timeout_seconds > 0) {
      context_.set_deadline(ForGrpc(spillway::After(timeout_seconds)));
    }
    call_ = stub_.PrepareCall(&context_, method, &queue_);
    call_->StartCall(Tag(Event::kStarted));
  }

  // For CallEnder.
  spillway_call* next_unended = nullptr;

  // Cancels the call. It can be destroyed once IsOver().
  void Abandon() {
    context_.TryCancel();
    queue_.Shutdown();
  }
  // Whether gRPC has nothing of an abandoned call any more, after a wait until `deadline`.
  bool IsOver(spillway::SteadyTime deadline) {
    void* tag;
    bool ok;
    auto next = grpc::CompletionQueue::GOT_EVENT;
    while (next == grpc::CompletionQueue::GOT_EVENT) {
      next = queue_.AsyncNext(&tag, &ok, ForGrpc(deadline));
    }
    return next == grpc::CompletionQueue::SHUTDOWN;
  }

  int Send(const void* message, size_t size, double timeout_seconds) {
    const spillway::SteadyTime deadline = spillway::After(timeout_seconds);
    const spillway::MutexLock lock(mutex_);
    // Without a limit, a fast sender would keep all its messages in memory.
    while (!broken_ && unsent_bytes_ > 0 && unsent_bytes_ + size > SPILLWAY_UNSENT_BYTES_MAX) {
      // A read tells that the call has ended. The write does not, while the socket is full.
      wanted_ = true;
      ReadNext();
      if (!Await(deadline)) return SPILLWAY_TIMED_OUT;
    }
    if (broken_) return -1;
    grpc::Slice slice(message, size);
    unsent_bytes_ += size;
    to_write_.push_back({grpc::ByteBuffer(&slice, 1), grpc::WriteOptions(), size});
    WriteNext();
    // Handles events that have already arrived: usually the write is complete, and the next message
    // can be written at once.
    if (!driven_) Drive(/*deadline=*/spillway::SteadyTime());
    return 0;
  }

  // Sends messages whose answers the caller then reads with Receive. Starts to read the first
  // answer at once, so that gRPC can receive it while this thread is in Receive of another call.
  // REQUIRES: no other thread sends or receives.
  void Ask(std::span<grpc::Slice> messages) {
    const spillway::MutexLock lock(mutex_);
    for (grpc::Slice& message : messages) {
      grpc::WriteOptions options;
      if (&message != &messages.back()) options.set_buffer_hint();
      unsent_bytes_ += message.size();
      to_write_.push_back({grpc::ByteBuffer(&message, 1), options, message.size()});
    }
    WriteNext();
    // gRPC allows only one write at a time, so wait for each write before the next one.
    while (to_write_.size() > 0 && !broken_ && Drive(spillway::SteadyTime())) {
    }
    wanted_ = true;
    ReadNext();
  }

  void SendEnd() {
    const spillway::MutexLock lock(mutex_);
    last_ = true;
    WriteNext();
  }

  int Receive(double timeout_seconds, const void** message, size_t* size) {
    return Receive(spillway::After(timeout_seconds), message, size);
  }

  int Receive(spillway::SteadyTime deadline, const void** message, size_t* size) {
    const spillway::MutexLock lock(mutex_);
    wanted_ = true;
    ReadNext();
    while (!arrived_ && !ended_ && Await(deadline)) {
    }
    if (arrived_) {
      arrived_ = false;
      wanted_ = false;
      received_ = std::exchange(next_, grpc::Slice());
      *message = received_.begin();
      *size = received_.size();
      return SPILLWAY_RECEIVED;
    }
    return ended_ ? SPILLWAY_ENDED : SPILLWAY_TIMED_OUT;
  }

  // Constant after the stream has ended.
  const grpc::Status& status() const { return status_; }
  const std::string& message() const { return message_; }
  const std::string& details() const { return details_; }

  void Cancel() { context_.TryCancel(); }

 private:
  struct Message {
    grpc::ByteBuffer bytes;
    grpc::WriteOptions options;
    size_t size;
  };
  enum class Event : intptr_t { kStarted = 1, kWritten, kRead, kFinished };
  static void* Tag(Event event) { return reinterpret_cast<void*>(event); }
  // The time that is left until then, which gRPC takes as a deadline.
  static gpr_timespec ForGrpc(spillway::SteadyTime deadline) {
    if (deadline == spillway::kNever) return gpr_inf_future(GPR_CLOCK_MONOTONIC);
    const auto left =
        std::chrono::duration_cast<std::chrono::microseconds>(deadline - spillway::SteadyNow());
    return gpr_time_from_micros(left.count(), GPR_TIMESPAN);
  }

  void WriteNext() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    if (!started_ || writing_ || broken_ || said_last_) return;
    if (to_write_.empty()) {
      if (!last_) return;
      writing_ = said_last_ = true;
      return call_->WritesDone(Tag(Event::kWritten));
    }
    writing_ = true;
    writing_bytes_ = to_write_.front().size;
    call_->Write(to_write_.front().bytes, to_write_.front().options, Tag(Event::kWritten));
    to_write_.pop_front();
  }

  // Reads a message only when one is wanted, so that the daemon's flow control limits the messages
  // in flight.
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

  // Waits for an event, which another thread may handle. Returns false at the deadline.
  bool Await(spillway::SteadyTime deadline) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    return driven_ ? changed_.WaitUntil(mutex_, deadline) : Drive(deadline);
  }

  // Waits for one event of the queue, without holding the lock. Returns false at the deadline.
  bool Drive(spillway::SteadyTime deadline) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    driven_ = true;
    mutex_.Unlock();
    void* tag;
    bool ok;
    const auto next = queue_.AsyncNext(&tag, &ok, ForGrpc(deadline));
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
        unsent_bytes_ -= std::exchange(writing_bytes_, 0);
        // The pending read fails too, and then Finish() gets the status of the stream.
        if (!ok) Break();
        return WriteNext();
      case Event::kRead:
        reading_ = false;
        if (!ok) return Finish();
        if (!incoming_.DumpToSingleSlice(&next_).ok()) next_ = grpc::Slice();
        arrived_ = true;
        return;
      case Event::kFinished:
        message_ = status_.error_message();
        details_ = status_.error_details();
        ended_ = true;
        if (status_.error_code() == grpc::StatusCode::UNAVAILABLE) when_unavailable_();
        return;
    }
  }

  grpc::GenericStub stub_;
  const std::function<void()> when_unavailable_;
  grpc::ClientContext context_;
  grpc::CompletionQueue queue_;
  std::unique_ptr<grpc::GenericClientAsyncReaderWriter> call_;

  spillway::Mutex mutex_;
  spillway::CondVar changed_;
  std::deque<Message> to_write_ ABSL_GUARDED_BY(mutex_);
  size_t unsent_bytes_ ABSL_GUARDED_BY(mutex_) = 0;   // of to_write_, and of what is being written
  size_t writing_bytes_ ABSL_GUARDED_BY(mutex_) = 0;  // of the latter
  grpc::ByteBuffer incoming_ ABSL_GUARDED_BY(mutex_);
  grpc::Slice next_ ABSL_GUARDED_BY(mutex_);      // has arrived
  grpc::Slice received_ ABSL_GUARDED_BY(mutex_);  // last message that Receive returned
  // May be read without the lock after the stream has ended.
  grpc::Status status_;
  std::string message_;
  std::string details_;
  bool driven_ ABSL_GUARDED_BY(mutex_) = false;   // a thread waits for the queue
  bool started_ ABSL_GUARDED_BY(mutex_) = false;  // reads and writes may begin
  bool writing_ ABSL_GUARDED_BY(mutex_) = false;
  bool last_ ABSL_GUARDED_BY(mutex_) = false;       // no message follows those in to_write_
  bool said_last_ ABSL_GUARDED_BY(mutex_) = false;  // WritesDone was called
  bool reading_ ABSL_GUARDED_BY(mutex_) = false;
  bool wanted_ ABSL_GUARDED_BY(mutex_) = false;   // a Send or Receive waits for a message, or did
  bool arrived_ ABSL_GUARDED_BY(mutex_) = false;  // next_ holds a message
  bool broken_ ABSL_GUARDED_BY(mutex_) = false;   // nothing more can be written
  bool finishing_ ABSL_GUARDED_BY(mutex_) = false;
  bool ended_ ABSL_GUARDED_BY(mutex_) = false;
};

namespace spillway {

// Ends a call, which nothing uses any more. Waits a moment at most: while a daemon is stopped, gRPC
// keeps what it could not write to the full socket. Such a call is destroyed by a later one that
// ends.
struct CallEnder {
  void operator()(spillway_call* call) const;
};
using CallPointer = std::unique_ptr<spillway_call, CallEnder>;

}  // namespace spillway
