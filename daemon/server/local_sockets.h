#pragma once

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/statusor.h"
#include "daemon/config/socket_path.h"
#include "daemon/server/acceptor.h"
#include "daemon/server/region_server.h"
#include "engine/regions.h"
#include "host/base/descriptor.h"
#include "host/base/mutex.h"
#include "services/log/event_log.h"

namespace spillway {

// The unix sockets of a daemon: the one for calls and the one for regions beside it. If somebody
// removes their files, listens there again. Thread-safe, except for Keep().
class LocalSockets {
 public:
  // Listens at the path, for the users that `access` allows. Regions are served from now on; calls
  // wait until an acceptor is set. All references must outlive this. Errors as SocketPath::Claim
  // and ListenAtPath.
  static absl::StatusOr<std::unique_ptr<LocalSockets>> Open(const std::string& path,
                                                            const SocketAccess& access,
                                                            RegionTable* regions, EventLog& events);

  // The socket for calls, for the acceptor. REQUIRES: called once.
  Descriptor TakeListener() { return std::move(listener_); }

  // Looks after the files of the sockets, and logs what has changed. acceptor: has the socket for
  // calls.
  void Keep(Acceptor& acceptor) ABSL_LOCKS_EXCLUDED(mutex_);
  // Why new clients cannot connect; empty if they can.
  std::string trouble() const ABSL_LOCKS_EXCLUDED(mutex_);

 private:
  LocalSockets(std::string path, const SocketAccess& access, SocketPath files, EventLog& events)
      : path_(std::move(path)), access_(access), files_(std::move(files)), events_(events) {}
  absl::StatusOr<Descriptor> Listen(const std::string& path, int type);
  // Listens at the paths that are gone, and returns these.
  absl::StatusOr<std::vector<std::string>> Restore(Acceptor& acceptor);

  const std::string path_;
  const SocketAccess access_;
  SocketPath files_;
  EventLog& events_;
  Descriptor listener_;
  std::unique_ptr<RegionServer> region_server_;
  mutable Mutex mutex_;
  std::string trouble_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace spillway
