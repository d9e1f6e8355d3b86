#pragma once

#include <memory>
#include <string>
#include <thread>

#include "absl/status/statusor.h"
#include "daemon/config/socket_path.h"
#include "daemon/engine/regions.h"

namespace spillway {

// Passes the descriptors of regions to the processes that attached them, over a unix socket
// (proto/spillway/v1/memory_service.proto describes it). A session ends when its socket closes or
// its process ends. Uses one thread.
class RegionServer {
 public:
  // Listens at `path`, for the users that `access` allows. The directory of `path` belongs to the
  // daemon. A socket that a dead daemon left there is removed. The table must outlive the server.
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
