#pragma once

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
#include "daemon/doorbell/doorbell_memory.h"
#include "google/rpc/status.pb.h"
#include "grpcpp/channel.h"
#include "grpcpp/support/status.h"
#include "host/base/descriptor.h"
#include "host/base/mutex.h"
#include "host/device/step_tensors.h"
#include "host/ipc/bell.h"

namespace spillway {

// The serialised google.rpc.Status of an error that a daemon has answered; empty of
// another.
std::string DaemonDetails(const absl::Status& status);
// An error of a daemon's, with its DaemonDetails().
absl::Status FromDaemon(const grpc::Status& status);
absl::Status FromDaemon(const google::rpc::Status& status);
// Of an answer that no daemon of this version gives.
absl::Status NoSense();

// The socket that says that this process lives, and hands over its regions.
class SessionSocket {
 public:
  // UNIMPLEMENTED where it cannot be reached.
  static absl::StatusOr<std::shared_ptr<SessionSocket>> Connect(const std::string& path);

  const std::string& session() const { return session_; }
  // Whether the daemon still holds the other end.
  bool alive() const;
  // Descriptor of a region. Not thread-safe.
  absl::StatusOr<Descriptor> Receive(const std::string& region) const;

 private:
  SessionSocket(Descriptor socket, std::string session)
      : socket_(std::move(socket)), session_(std::move(session)) {}

  const Descriptor socket_;
  const std::string session_;
};

// One doorbell of a daemon, mapped here. One thread at a time.
class Doorbell {
 public:
  // Maps it.
  static absl::StatusOr<std::unique_ptr<Doorbell>> Map(std::shared_ptr<SessionSocket> socket,
                                                       std::string name,
                                                       const Descriptor& descriptor,
                                                       int64_t byte_count);
  ~Doorbell();
  Doorbell(const Doorbell&) = delete;
  Doorbell& operator=(const Doorbell&) = delete;

  const std::string& name() const { return name_; }
  const std::shared_ptr<SessionSocket>& socket() const { return socket_; }
  // Whether no call can be made any more.
  bool broken() const { return broken_; }
  // Whether a call that was given up may keep the daemon from the next one.
  bool busy() const { return abandoned_ && !answered(); }
  // What a call and its answer lie in.
  std::span<std::byte> data() const { return data_; }

  // Rings and waits for the answer. Errors are the daemon's, with DaemonDetails();
  // UNAVAILABLE when it is gone, and from then on.
  absl::StatusOr<DoorbellAnswer> Call(const DoorbellCall& call);
  // The same in two. Rings, once what was posted is answered;
  absl::Status Ring(const DoorbellCall& call);
  // and waits for the answer, or until the deadline or a signal: nullopt. Call again.
  absl::StatusOr<std::optional<DoorbellAnswer>> Answer(BellWaiter::Clock::time_point deadline);
  // How long waits for answers spin at most.
  void SetSpinMax(std::chrono::nanoseconds most) { waiter_.SetSpinMax(most); }
  // All of an answer that comes in pieces: the call is made again from where they end.
  absl::StatusOr<std::string> CallForAll(DoorbellCall call);
  // Rings, and leaves the answer to be waited for by the next call.
  void Post(const DoorbellCall& call);
  // Ends the daemon's step though its last call is not answered: a call that is being
  // answered is answered first, and one that is not is dropped.
  void Abandon();
  // Whether all calls are answered.
  bool answered() const;

 private:
  Doorbell(std::shared_ptr<SessionSocket> socket, std::string name, std::span<std::byte> bytes);

  // Waits for the answer to the last call, or until the deadline or a signal: false.
  absl::StatusOr<bool> Await(BellWaiter::Clock::time_point deadline);

  const std::shared_ptr<SessionSocket> socket_;
  const std::string name_;
  const std::span<std::byte> bytes_;
  DoorbellMemory& memory_;
  const std::span<std::byte> data_;
  BellWaiter waiter_;
  uint32_t rung_ = 0;
  bool broken_ = false;
  bool abandoned_ = false;  // since the last answer
};

// An attend of a step or a decoder at a layer.
DoorbellCall AttendCall(DoorbellCallKind kind, int layer, const StepTensors& tensors);

// What a channel to a daemon on this host shares with it. Thread-safe.
class DaemonSession {
 public:
  // target: as of spillway_channel_open. client_id: of the client whose calls they are.
  DaemonSession(std::string target, std::shared_ptr<grpc::Channel> channel, std::string client_id)
      : target_(std::move(target)),
        channel_(std::move(channel)),
        client_id_(std::move(client_id)) {}

  // A doorbell whose data hold so many bytes: one that was given back and is not busy, or
  // a new one.
  // UNIMPLEMENTED, telling why, where the daemon shares no memory with this process.
  absl::StatusOr<std::unique_ptr<Doorbell>> Take(int64_t data_bytes) ABSL_LOCKS_EXCLUDED(mutex_);
  // For the next Take(); detaches one that is broken or not needed.
  void Give(std::unique_ptr<Doorbell> doorbell) ABSL_LOCKS_EXCLUDED(mutex_);

 private:
  absl::StatusOr<std::shared_ptr<SessionSocket>> Connected() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void Detach(const Doorbell& doorbell);

  const std::string target_;
  const std::shared_ptr<grpc::Channel> channel_;
  const std::string client_id_;
  Mutex mutex_;
  std::string path_ ABSL_GUARDED_BY(mutex_);  // of the socket; empty before it was reached
  std::shared_ptr<SessionSocket> socket_ ABSL_GUARDED_BY(mutex_);
  std::vector<std::unique_ptr<Doorbell>> idle_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace spillway
