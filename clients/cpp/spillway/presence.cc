#include "spillway/presence.h"

#include <algorithm>
#include <chrono>
#include <optional>
#include <random>
#include <utility>

#include "absl/strings/str_cat.h"
#include "grpcpp/client_context.h"
#include "grpcpp/completion_queue.h"
#include "spillway/v1/sequence_service.grpc.pb.h"

namespace spillway {
namespace {

// A daemon that stops waits until its clients have read that.
constexpr std::chrono::milliseconds kLookInterval{100};
// Most looks between two attempts, if the daemon keeps refusing.
constexpr int kPauseMax = 80;
// How long the connection is read after a call that found no daemon, at most, and at a time.
constexpr std::chrono::seconds kReadTime{5};
constexpr std::chrono::milliseconds kReadInterval{100};

// Most time to wait at the end for a connection that is being made.
constexpr std::chrono::milliseconds kEndTime{200};

// Waits for a change of the channel's state, and reads its connection meanwhile. The queue is used
// for nothing else.
void AwaitChange(grpc::Channel& channel, grpc_connectivity_state state,
                 std::chrono::milliseconds most, grpc::CompletionQueue& queue) {
  channel.NotifyOnStateChange(state, gpr_time_from_millis(most.count(), GPR_TIMESPAN), &queue,
                              /*tag=*/nullptr);
  void* tag;
  bool ok;
  queue.Next(&tag, &ok);
}

void Drain(grpc::CompletionQueue& queue) {
  queue.Shutdown();
  void* tag;
  bool ok;
  while (queue.Next(&tag, &ok)) {
  }
}

// A random id of 128 bits.
std::string NewId() {
  std::random_device random;
  std::string id;
  for (int i = 0; i < 4; ++i) absl::StrAppend(&id, absl::Hex(random(), absl::kZeroPad8));
  return id;
}

}  // namespace

// One Connect stream.
class PresenceKeeper::Connection {
 public:
  Connection(const std::shared_ptr<grpc::Channel>& channel, const std::string& client_id)
      : stub_(v1::SequenceService::NewStub(channel)) {
    // If the daemon restarts, wait for it.
    context_.set_wait_for_ready(true);
    v1::ConnectRequest request;
    request.set_client_id(client_id);
    stream_ = stub_->AsyncConnect(&context_, request, &queue_, Tag(Event::kStarted));
  }
  ~Connection() {
    context_.TryCancel();
    Drain(queue_);
  }

  // The status code of the stream if it has ended. Does not wait.
  std::optional<grpc::StatusCode> Look() {
    void* tag;
    bool ok;
    while (queue_.AsyncNext(&tag, &ok, gpr_time_0(GPR_TIMESPAN)) ==
           grpc::CompletionQueue::GOT_EVENT) {
      if (tag == Tag(Event::kEnded)) return status_.error_code();
      stream_->Finish(&status_, Tag(Event::kEnded));
    }
    return std::nullopt;
  }

 private:
  enum class Event : intptr_t { kStarted = 1, kEnded };
  static void* Tag(Event event) { return reinterpret_cast<void*>(event); }

  const std::unique_ptr<v1::SequenceService::Stub> stub_;
  grpc::ClientContext context_;
  grpc::CompletionQueue queue_;
  grpc::Status status_;
  std::unique_ptr<grpc::ClientAsyncReader<v1::ConnectResponse>> stream_;
};

PresenceKeeper::PresenceKeeper(std::shared_ptr<grpc::Channel> channel)
    : channel_(std::move(channel)),
      client_id_(NewId()),
      connection_(std::make_unique<Connection>(channel_, client_id_)),
      thread_([this] { Run(); }) {}

PresenceKeeper::~PresenceKeeper() {
  {
    const MutexLock lock(mutex_);
    stopped_ = true;
  }
  wake_.NotifyOne();
  thread_.join();
  connection_.reset();
  // If its channel goes while gRPC greets a daemon that has just started, nothing reads that
  // connection any more. It stays open for up to 20 s, and a daemon that stops waits for it. After
  // a call that found no daemon, the channel's state does not tell whether gRPC connects again.
  grpc::CompletionQueue queue;
  const auto end = std::chrono::steady_clock::now() + kEndTime;
  for (;;) {
    const grpc_connectivity_state state = channel_->GetState(/*try_to_connect=*/false);
    if (state != GRPC_CHANNEL_CONNECTING && state != GRPC_CHANNEL_TRANSIENT_FAILURE) break;
    if (std::chrono::steady_clock::now() >= end) break;
    AwaitChange(*channel_, state, kEndTime / 10, queue);
  }
  Drain(queue);
}

void PresenceKeeper::Reconnect() const {
  const MutexLock lock(mutex_);
  reconnects_ = true;
  wake_.NotifyOne();
}

void PresenceKeeper::AwaitReady() const {
  grpc::CompletionQueue queue;
  const auto end = std::chrono::steady_clock::now() + kReadTime;
  for (;;) {
    const grpc_connectivity_state state = channel_->GetState(/*try_to_connect=*/true);
    if (state == GRPC_CHANNEL_READY || state == GRPC_CHANNEL_SHUTDOWN) break;
    if (std::chrono::steady_clock::now() >= end) break;
    AwaitChange(*channel_, state, kReadInterval, queue);
    const MutexLock lock(mutex_);
    if (stopped_) break;
  }
  Drain(queue);
}

void PresenceKeeper::Run() {
  int lived = 0;         // looks since the stream was opened or ended
  int pause = 1;         // looks before the stream is opened again
  bool unknown = false;  // whether the daemon does not have the call
  auto next = std::chrono::steady_clock::now();
  MutexLock lock(mutex_);
  for (;;) {
    next += kLookInterval;
    while (!stopped_) {
      if (std::exchange(reconnects_, false)) {
        lock.Unlock();
        AwaitReady();
        lock.Lock();
      } else if (!wake_.WaitUntil(mutex_, next)) {
        break;
      }
    }
    if (stopped_) return;
    next = std::max(next, std::chrono::steady_clock::now());
    if (unknown) continue;
    ++lived;
    if (connection_ == nullptr) {
      if (lived >= pause) {
        connection_ = std::make_unique<Connection>(channel_, client_id_);
        lived = 0;
      }
      continue;
    }
    const std::optional<grpc::StatusCode> ended = connection_->Look();
    if (!ended) continue;
    // An older daemon without this call keeps all sequences until their ttl.
    if (*ended == grpc::StatusCode::UNIMPLEMENTED) unknown = true;
    pause = lived > pause ? 1 : std::min(2 * pause, kPauseMax);
    lived = 0;
    connection_.reset();
  }
}

}  // namespace spillway
