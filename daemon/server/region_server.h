#pragma once

#include <memory>
#include <thread>

#include "absl/status/statusor.h"
#include "daemon/engine/regions.h"
#include "host/base/descriptor.h"

namespace spillway {

// Passes the descriptors of regions to the processes that attached them, over a unix socket
// (proto/spillway/v1/memory_service.proto describes it). A session ends when its socket closes or
// its process ends. Uses one thread.
class RegionServer {
 public:
  // listener: a socket of SOCK_SEQPACKET. The table must outlive the server.
  static absl::StatusOr<std::unique_ptr<RegionServer>> Start(Descriptor listener,
                                                             RegionTable* regions);
  // Ends every session.
  ~RegionServer();
  // Accepts from another socket from now on, because the file of the first is gone. Sessions stay.
  void Replace(Descriptor listener);
  RegionServer(const RegionServer&) = delete;
  RegionServer& operator=(const RegionServer&) = delete;

 private:
  class Loop;
  explicit RegionServer(std::unique_ptr<Loop> loop);

  const std::unique_ptr<Loop> loop_;
  std::thread thread_;
};

}  // namespace spillway
