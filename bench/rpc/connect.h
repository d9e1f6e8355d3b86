#pragma once

#include <memory>
#include <string>

#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "spillway/client.h"

namespace spillway::bench {

// A client of a daemon that may not listen yet. UNAVAILABLE when it does not
// within `patience`.
absl::StatusOr<std::unique_ptr<Client>> ConnectWithin(const std::string& target,
                                                      absl::Duration patience);

}  // namespace spillway::bench
