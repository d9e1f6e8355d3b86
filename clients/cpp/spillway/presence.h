// Tells a daemon that this client is there, so that it keeps the sequences that nobody has named.
#pragma once

#include <memory>
#include <string>
#include <thread>

#include "absl/base/thread_annotations.h"
#include "grpcpp/channel.h"
#include "host/base/mutex.h"

namespace spillway {

// Metadata by which calls say which client they are of: PresenceKeeper::client_id().
inline constexpr char kClientMetadata[] = "spillway-client";

// A client under a random id, and the Connect stream that says that it is there
// (SequenceService.Connect), opened anew where it breaks. Nobody waits for the stream: whoever
// makes a call reads its connection, and a thread of its own looks once a second, asleep
// else. Thread-safe.
class PresenceKeeper {
 public:
  // Opens the stream, ahead of the calls that follow.
  explicit PresenceKeeper(std::shared_ptr<grpc::Channel> channel);
  // Ends it: the client is gone.
  ~PresenceKeeper();
  PresenceKeeper(const PresenceKeeper&) = delete;
  PresenceKeeper& operator=(const PresenceKeeper&) = delete;

  const std::string& client_id() const { return client_id_; }

 private:
  class Connection;

  void Run() ABSL_LOCKS_EXCLUDED(mutex_);

  const std::shared_ptr<grpc::Channel> channel_;
  const std::string client_id_;
  std::unique_ptr<Connection> connection_;  // the thread's, once that runs
  Mutex mutex_;
  CondVar wake_;
  bool stopped_ ABSL_GUARDED_BY(mutex_) = false;
  std::thread thread_;
};

}  // namespace spillway
