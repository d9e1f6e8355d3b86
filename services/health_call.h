#pragma once

#include <memory>

#include "absl/status/status.h"
#include "absl/time/time.h"
#include "grpcpp/channel.h"

namespace spillway {

// Asks the health service of the server behind a channel, as a probe would, and waits for the
// answer. OK for any answer, also NOT_SERVING; DEADLINE_EXCEEDED or gRPC's error if there is none.
absl::Status AskHealth(const std::shared_ptr<grpc::Channel>& channel, absl::Duration timeout);

}  // namespace spillway
