#include "daemon/server/local_sockets.h"

#include <sys/socket.h>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "daemon/server/listeners.h"
#include "host/base/status_macros.h"
#include "services/log/logging.h"

namespace spillway {

absl::StatusOr<std::unique_ptr<LocalSockets>> LocalSockets::Open(const std::string& path,
                                                                 const SocketAccess& access,
                                                                 RegionTable* regions,
                                                                 EventLog& events) {
  ASSIGN_OR_RETURN(SocketPath files, SocketPath::Claim(path, access));
  std::unique_ptr<LocalSockets> sockets(new LocalSockets(path, access, std::move(files), events));
  ASSIGN_OR_RETURN(Descriptor listener,
                   sockets->Listen(absl::StrCat(path, kRegionsSuffix), SOCK_SEQPACKET));
  ASSIGN_OR_RETURN(
      sockets->region_server_,
      RegionServer::Start(std::move(listener), RegionServer::Limits::OfProcess(), regions));
  ASSIGN_OR_RETURN(sockets->listener_, sockets->Listen(path, SOCK_STREAM));
  return sockets;
}

absl::StatusOr<Descriptor> LocalSockets::Listen(const std::string& path, int type) {
  ASSIGN_OR_RETURN(Descriptor listener, ListenAtPath(path, type, access_));
  files_.NoteOwn(path);
  return listener;
}

absl::StatusOr<std::vector<std::string>> LocalSockets::Restore(Acceptor& acceptor) {
  ASSIGN_OR_RETURN(std::vector<std::string> gone, files_.FindGone());
  for (const std::string& path : gone) {
    if (path == path_) {
      ASSIGN_OR_RETURN(Descriptor listener, Listen(path, SOCK_STREAM));
      acceptor.Replace(std::move(listener));
    } else if (path == absl::StrCat(path_, kRegionsSuffix)) {
      ASSIGN_OR_RETURN(Descriptor listener, Listen(path, SOCK_SEQPACKET));
      region_server_->Replace(std::move(listener));
    }
  }
  return gone;
}

void LocalSockets::Keep(Acceptor& acceptor) {
  const absl::StatusOr<std::vector<std::string>> gone = Restore(acceptor);
  const std::string trouble(gone.status().message());
  if (gone.ok() && !gone->empty()) {
    events_.Warning("socket_restored", {{"removed", absl::StrJoin(*gone, ", ")},
                                        {"advice", "something removes the daemon's files"}});
  }
  const MutexLock lock(mutex_);
  if (trouble == trouble_) return;
  if (!gone.ok()) {
    events_.Warning("socket_lost", {{"error", trouble},
                                    {"advice",
                                     "no new client can connect; the daemon listens again "
                                     "when the path is free"}});
  } else {
    LogInfo("socket_back", {{"path", path_}});
  }
  trouble_ = trouble;
}

std::string LocalSockets::trouble() const {
  const MutexLock lock(mutex_);
  return trouble_.empty() ? "" : absl::StrCat("no new client can connect: ", trouble_);
}

}  // namespace spillway
