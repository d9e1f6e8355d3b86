#pragma once

#include <memory>
#include <string>
#include <thread>

#include "absl/status/statusor.h"
#include "daemon/config/socket_path.h"
#include "daemon/engine/regions.h"

namespace spillway {

// Hands the descriptors of regions to the processes that attached them, over a
// unix socket (proto/spillway/v1/memory_service.proto says how), and ends a
// session when its socket closes or its process ends. One thread.
class RegionServer {
 public:
  // Serves those whom `access` lets in at `path`, whose directory is the daemon's own; a socket
  // that a dead daemon left there is removed. The table outlives the server.
  static absl::StatusOr<std::unique_ptr<RegionServer>> Start(const std::string& path,
                                                             const SocketAccess& access,
                                                             RegionTable* regions);
  // Ends every session.
  ~RegionServer();
  RegionServer(const RegionServer&) = delete;
  RegionServer& operator=(const RegionServer&) = delete;

 private:
  class Loop;
  RegionServer(std::string path, std::unique_ptr<Loop> loop);

  const std::string path_;
  const std::unique_ptr<Loop> loop_;
  std::thread thread_;
};

}  // namespace spillway
