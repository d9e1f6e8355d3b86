// Tells a daemon that this client is connected, so that it keeps the client's unnamed sequences.
#pragma once

#include <memory>
#include <string>
#include <thread>

#include "absl/base/thread_annotations.h"
#include "grpcpp/channel.h"
#include "host/base/mutex.h"

namespace spillway {

// Metadata with which calls name their client: PresenceKeeper::client_id().
inline constexpr char kClientMetadata[] = "spillway-client";

// The random id of a client, and its stream SequenceService.Connect, which is opened again if it
// breaks. No thread waits for the stream. Calls of the client read its connection, and a thread of
// its own checks it ten times a second. Thread-safe.
class PresenceKeeper {
 public:
  // Opens the stream, before any other call.
  explicit PresenceKeeper(std::shared_ptr<grpc::Channel> channel);
  // Ends the stream: the client is gone.
  ~PresenceKeeper();
  PresenceKeeper(const PresenceKeeper&) = delete;
  PresenceKeeper& operator=(const PresenceKeeper&) = delete;

  const std::string& client_id() const { return client_id_; }

  // To be called after a call that found no daemon. Such calls fail at once, and gRPC then reads
  // nothing while it connects: without this, a daemon that is back is found seconds later.
  void Reconnect() const ABSL_LOCKS_EXCLUDED(mutex_);

 private:
  class Connection;

  void Run() ABSL_LOCKS_EXCLUDED(mutex_);
  // Reads the connection until it is ready, for a while.
  void AwaitReady() const ABSL_LOCKS_EXCLUDED(mutex_);

  const std::shared_ptr<grpc::Channel> channel_;
  const std::string client_id_;
  std::unique_ptr<Connection> connection_;  // used only by the thread, once it runs
  mutable Mutex mutex_;
  mutable CondVar wake_;
  bool stopped_ ABSL_GUARDED_BY(mutex_) = false;
  mutable bool reconnects_ ABSL_GUARDED_BY(mutex_) = false;
  std::thread thread_;
};

}  // namespace spillway
