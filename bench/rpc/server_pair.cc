#include "bench/rpc/server_pair.h"

#include <cerrno>
#include <cstdlib>
#include <filesystem>
#include <utility>

#include "absl/status/status.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"

namespace spillway::bench {
namespace {

// Connects to a daemon that may not listen yet: retries while it is unavailable, until `patience`
// is over.
absl::StatusOr<std::unique_ptr<Client>> ConnectWithin(const std::string& target,
                                                      absl::Duration patience) {
  const absl::Time end = absl::Now() + patience;
  while (true) {
    absl::StatusOr<std::unique_ptr<Client>> client = Client::Connect(target);
    if (client.ok() || !absl::IsUnavailable(client.status()) || absl::Now() > end) return client;
    absl::SleepFor(absl::Milliseconds(20));
  }
}

}  // namespace

absl::StatusOr<std::unique_ptr<ServerPair>> ServerPair::Start(const std::string& spillwayd,
                                                              const std::string& device,
                                                              const std::string& echo_server) {
  std::string path = (std::filesystem::temp_directory_path() / "spillway-rpc-XXXXXX").string();
  if (mkdtemp(path.data()) == nullptr) return absl::ErrnoToStatus(errno, path);
  std::unique_ptr<ServerPair> pair(new ServerPair(path));
  absl::StatusOr<ChildProcess> echo = ChildProcess::Start({echo_server, pair->echo_target()});
  if (!echo.ok()) return echo.status();
  pair->echo_server_.emplace(*std::move(echo));
  absl::StatusOr<ChildProcess> daemon = ChildProcess::Start(
      {spillwayd, "--listen", pair->daemon_target(), "--device", device, "--log-level", "warning"});
  if (!daemon.ok()) return daemon.status();
  pair->daemon_.emplace(*std::move(daemon));
  absl::StatusOr<std::unique_ptr<Client>> client =
      ConnectWithin(pair->daemon_target(), absl::Seconds(20));
  if (!client.ok()) return client.status();
  pair->client_ = *std::move(client);
  return pair;
}

ServerPair::~ServerPair() {
  client_.reset();
  daemon_.reset();
  echo_server_.reset();
  std::filesystem::remove_all(directory_);
}

}  // namespace spillway::bench
