#pragma once

#include <memory>
#include <optional>
#include <string>
#include <utility>

#include "absl/status/statusor.h"
#include "bench/rpc/child_process.h"
#include "spillway/client.h"

namespace spillway::bench {

// Starts a daemon and an echo server on unix sockets in a temporary directory. The destructor ends
// both and deletes the directory.
class ServerPair {
 public:
  // device: of the daemon. UNAVAILABLE if the daemon does not listen within 20 seconds. The echo
  // server may not listen yet when this returns.
  static absl::StatusOr<std::unique_ptr<ServerPair>> Start(const std::string& spillwayd,
                                                           const std::string& device,
                                                           const std::string& echo_server);
  ~ServerPair();
  ServerPair(const ServerPair&) = delete;
  ServerPair& operator=(const ServerPair&) = delete;

  std::string daemon_target() const { return "unix:" + directory_ + "/daemon"; }
  std::string echo_target() const { return "unix:" + directory_ + "/echo"; }
  Client& client() { return *client_; }

 private:
  explicit ServerPair(std::string directory) : directory_(std::move(directory)) {}

  const std::string directory_;
  std::optional<ChildProcess> echo_server_;
  std::optional<ChildProcess> daemon_;
  std::unique_ptr<Client> client_;
};

}  // namespace spillway::bench
