#pragma once

#include <chrono>
#include <cstdint>
#include <memory>
#include <thread>

#include "absl/status/statusor.h"
#include "engine/regions.h"
#include "host/base/descriptor.h"

namespace spillway {

// Passes the descriptors of regions to the processes that attached them, over a unix socket
// (proto/spillway/v1/memory_service.proto describes it). A session ends when its socket closes or
// its process ends, or because it is not used: see Limits. Uses one thread.
class RegionServer {
 public:
  // Sessions that own nothing must not keep others out: anybody who may open the socket can open
  // them, without a token.
  struct Limits {
    // A session that no call has named ends after this time. One without regions that no call has
    // named for this time counts as unused.
    std::chrono::milliseconds unused_max{10000};
    // Sessions at the same time. For one more, an unused session ends: the oldest of the process
    // that has the most. If there is none, the new connection is closed at once.
    int64_t session_count_max = 1024;
    // The same for the sessions of one process. If the kernel cannot tell which process it is, as
    // in another PID namespace: of one user.
    int64_t peer_session_count_max = 512;

    // The defaults, or less if this process may open few files: a session takes two descriptors,
    // and all together take at most a quarter of what it may open.
    static Limits OfProcess();
  };

  // listener: a socket of SOCK_SEQPACKET. The table must outlive the server.
  static absl::StatusOr<std::unique_ptr<RegionServer>> Start(Descriptor listener,
                                                             const Limits& limits,
                                                             RegionTable* regions);
  // Ends every session. Their regions keep their content.
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
