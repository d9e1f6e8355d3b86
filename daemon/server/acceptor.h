#pragma once

#include <atomic>
#include <cstdint>
#include <map>
#include <memory>
#include <thread>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/time/time.h"
#include "grpcpp/security/server_credentials.h"
#include "grpcpp/server_builder.h"
#include "host/base/descriptor.h"
#include "host/base/mutex.h"
#include "services/log/event_log.h"

namespace spillway {

// Accepts connections for a gRPC server, in a thread of its own. While too few descriptors are
// free, it leaves new connections in the backlog of the sockets. Beyond the limit on connections it
// closes new ones at once. Both are logged (docs/adr/0043). Thread-safe.
class Acceptor {
 public:
  // For the server that `builder` builds. Connections use `credentials`. The event log must outlive
  // the acceptor.
  Acceptor(std::vector<Descriptor> listeners, int64_t connection_count_max,
           const std::shared_ptr<grpc::ServerCredentials>& credentials,
           grpc::ServerBuilder& builder, EventLog& events);
  // Calls Stop().
  ~Acceptor();
  Acceptor(const Acceptor&) = delete;
  Acceptor& operator=(const Acceptor&) = delete;

  // REQUIRES: the server has started; called only once.
  void Start();
  // Closes the sockets, so that new connections are refused. REQUIRES: the server is not shut down
  // yet. A second call does nothing.
  void Stop();
  // Accepts from another socket from now on, because the file of the first is gone. After Stop(),
  // does nothing. REQUIRES: made with one socket.
  void Replace(Descriptor listener) ABSL_LOCKS_EXCLUDED(mutex_);

  // Checks that the thread is running. DEADLINE_EXCEEDED if it does not answer within the timeout.
  // OK after Stop(). REQUIRES: started.
  absl::Status Check(absl::Duration timeout) ABSL_LOCKS_EXCLUDED(mutex_);

  // Connections that are open already stay open.
  void SetConnectionCountMax(int64_t count) { connection_count_max_ = count; }

  int64_t open_connection_count() ABSL_LOCKS_EXCLUDED(mutex_);
  // Since the start.
  int64_t shed_connection_count() const { return shed_connection_count_; }

 private:
  void Run() ABSL_LOCKS_EXCLUDED(mutex_);
  void Wake();
  // Accepts one connection; false if too few descriptors are free.
  bool Accept(int listener) ABSL_LOCKS_EXCLUDED(mutex_);
  void ForgetClosed() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  std::atomic<int64_t> connection_count_max_;
  const std::unique_ptr<grpc::experimental::ExternalConnectionAcceptor> server_;
  EventLog& events_;
  std::vector<Descriptor> listeners_;  // changes after the start are made under the lock
  const Descriptor wake_;
  std::thread thread_;
  std::atomic<int64_t> shed_connection_count_{0};
  std::atomic<bool> stopping_{false};
  Mutex mutex_;
  CondVar woken_;
  int64_t wake_count_ ABSL_GUARDED_BY(mutex_) = 0;
  bool stopped_ ABSL_GUARDED_BY(mutex_) = false;
  // Connections that may be open: descriptor and inode of the socket. gRPC closes connections
  // without telling us.
  std::map<int, uint64_t> sockets_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace spillway
