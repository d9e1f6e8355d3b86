#include "bench/rpc/connect.h"

#include "absl/time/clock.h"

namespace spillway::bench {

absl::StatusOr<std::unique_ptr<Client>> ConnectWithin(const std::string& target,
                                                      absl::Duration patience) {
  const absl::Time end = absl::Now() + patience;
  while (true) {
    absl::StatusOr<std::unique_ptr<Client>> client = Client::Connect(target);
    if (client.ok() || !absl::IsUnavailable(client.status()) || absl::Now() > end) return client;
    absl::SleepFor(absl::Milliseconds(20));
  }
}

}  // namespace spillway::bench
