#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "google/rpc/status.pb.h"
#include "grpcpp/channel.h"
#include "grpcpp/support/status.h"
#include "host/base/descriptor.h"
#include "host/base/mutex.h"
#include "host/device/step_tensors.h"
#include "host/ipc/bell.h"
#include "lib/region.h"
#include "services/doorbell/doorbell_memory.h"

namespace spillway {

// The serialised google.rpc.Status of an error from a daemon; empty for other errors.
std::string DaemonDetails(const absl::Status& status);
// An error from a daemon, with its DaemonDetails().
absl::Status FromDaemon(const grpc::Status& status);
absl::Status FromDaemon(const google::rpc::Status& status);
// The error for an answer that is not valid.
absl::Status NoSense();

// The socket of a session with the daemon. While it is open, the daemon keeps the session; it also
// passes the descriptors of the session's regions.
class SessionSocket {
 public:
  // UNAVAILABLE if the socket cannot be reached; RESOURCE_EXHAUSTED if the daemon has too many
  // sessions.
  static absl::StatusOr<std::shared_ptr<SessionSocket>> Connect(const std::string& path);

  const std::string& session() const { return session_; }
  int descriptor() const { return socket_.get(); }
  // Whether the daemon still holds the other end of the socket.
  bool alive() const;
  // Asks the daemon for the descriptor of a region. After an error other than NOT_FOUND, an answer
  // may still come, and nothing must be asked any more. Not thread-safe.
  absl::StatusOr<Descriptor> Receive(const std::string& region) const;

 private:
  SessionSocket(Descriptor socket, std::string session)
      : socket_(std::move(socket)), session_(std::move(session)) {}

  const Descriptor socket_;
  const std::string session_;
};

// A doorbell of a daemon, mapped into this process. Only one thread at a time may use it.
class Doorbell {
 public:
  static absl::StatusOr<std::unique_ptr<Doorbell>> Map(std::shared_ptr<SessionSocket> socket,
                                                       const v1::Region& region,
                                                       const Descriptor& descriptor);
  Doorbell(const Doorbell&) = delete;
  Doorbell& operator=(const Doorbell&) = delete;

  const std::string& name() const { return region_->name(); }
  const std::shared_ptr<SessionSocket>& socket() const { return socket_; }
  // Whether no more calls are possible.
  bool broken() const { return broken_; }
  // Whether an abandoned call is still unanswered, so that the next call would have to wait for it.
  bool busy() const { return abandoned_ && !answered(); }
  // Memory for the data of a call and of its answer.
  std::span<std::byte> data() const { return data_; }

  // Rings and waits for the answer. Errors come from the daemon, with DaemonDetails(). UNAVAILABLE
  // if the daemon is gone; all later calls then fail the same way.
  absl::StatusOr<DoorbellAnswer> Call(const DoorbellCall& call);
  // The same in two steps. Ring() first waits until a posted call is answered.
  absl::Status Ring(const DoorbellCall& call);
  // Waits for the answer; nullopt at the deadline or after a signal: then call Answer() again.
  absl::StatusOr<std::optional<DoorbellAnswer>> Answer(BellWaiter::Clock::time_point deadline);
  // Limit of the time that a wait for an answer spins before it sleeps.
  void SetSpinMax(std::chrono::nanoseconds most) { waiter_.SetSpinMax(most); }
  // Returns the whole of an answer that is larger than data(): repeats the call, each time from the
  // offset where the last piece ended.
  absl::StatusOr<std::string> CallForAll(DoorbellCall call);
  // Rings without waiting. The next call waits for the answer.
  void Post(const DoorbellCall& call);
  // Ends the daemon's step although the last call has no answer. If the daemon has started that
  // call, it completes it first; otherwise it drops the call.
  void Abandon();
  // Whether all calls are answered.
  bool answered() const;

 private:
  Doorbell(std::shared_ptr<SessionSocket> socket, std::unique_ptr<MappedRegion> region);

  // Waits for the answer to the last call. Returns false at the deadline or after a signal.
  absl::StatusOr<bool> Await(BellWaiter::Clock::time_point deadline);

  const std::shared_ptr<SessionSocket> socket_;
  const std::unique_ptr<MappedRegion> region_;
  DoorbellMemory& memory_;
  const std::span<std::byte> data_;
  BellWaiter waiter_;
  uint32_t rung_ = 0;
  bool broken_ = false;
  bool abandoned_ = false;  // Abandon() was called after the last answer
};

// The call that attends at a layer, for a step or a decoder.
DoorbellCall AttendCall(DoorbellCallKind kind, int layer, const StepTensors& tensors);

// The memory that a channel shares with a daemon on this host. Thread-safe.
class DaemonSession {
 public:
  // target: as in spillway_channel_open. client_id: id of the client that makes the calls.
  DaemonSession(std::string target, std::shared_ptr<grpc::Channel> channel, std::string client_id)
      : target_(std::move(target)),
        channel_(std::move(channel)),
        client_id_(std::move(client_id)) {}

  // Returns a doorbell with at least data_bytes of data: one that was given back and is not busy,
  // or a new one. UNIMPLEMENTED, with the reason, if the daemon shares no memory with this process.
  absl::StatusOr<std::unique_ptr<Doorbell>> Take(int64_t data_bytes) ABSL_LOCKS_EXCLUDED(mutex_);
  // Gives a doorbell back for the next Take(). Detaches it if it is broken, or if kIdleMax
  // doorbells are idle (then it detaches a busy one, if there is one).
  void Give(std::unique_ptr<Doorbell> doorbell) ABSL_LOCKS_EXCLUDED(mutex_);

  // The session's name, for AttachRegion. Opens the session if it has none, or if the daemon has
  // ended it. UNIMPLEMENTED as for Take(); UNAVAILABLE and RESOURCE_EXHAUSTED as for
  // SessionSocket::Connect().
  absl::StatusOr<std::string> Name() ABSL_LOCKS_EXCLUDED(mutex_);
  // Maps a region of the session. NOT_FOUND if the session has no such region.
  absl::StatusOr<std::unique_ptr<MappedRegion>> Map(const v1::AttachRegionResponse& response)
      ABSL_LOCKS_EXCLUDED(mutex_);
  // In a process that was forked from this one: closes its copy of the socket, which would keep the
  // parent's session. Takes no lock, because a thread of the parent may have held it.
  void LeaveToParent();

 private:
  // What needs the session.
  enum class Need { kDoorbell, kRegion };
  absl::StatusOr<std::shared_ptr<SessionSocket>> Connected(Need need)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // SessionSocket::Receive() of socket_. If nothing must be asked any more, another session is used
  // from then on. This one lasts, because the daemon clears what it shares with a session that
  // ends.
  absl::StatusOr<Descriptor> Receive(const v1::Region& region)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void Detach(std::unique_ptr<Doorbell> doorbell);

  const std::string target_;
  const std::shared_ptr<grpc::Channel> channel_;
  const std::string client_id_;
  Mutex mutex_;
  std::string path_ ABSL_GUARDED_BY(mutex_);  // of the socket; empty until the first connection
  bool shares_nothing_ ABSL_GUARDED_BY(mutex_) = false;  // as the daemon has said
  std::shared_ptr<SessionSocket> socket_ ABSL_GUARDED_BY(mutex_);
  std::shared_ptr<SessionSocket> retired_ ABSL_GUARDED_BY(mutex_);
  std::atomic<int> descriptor_ = -1, retired_descriptor_ = -1;  // of the sockets
  std::vector<std::unique_ptr<Doorbell>> idle_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace spillway
