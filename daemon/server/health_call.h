#pragma once

#include <memory>

#include "absl/status/status.h"
#include "absl/time/time.h"
#include "grpcpp/channel.h"

namespace spillway {

// Asks the health service of the server behind a channel, as a probe would, and waits. OK where it
// answers, whatever it says; DEADLINE_EXCEEDED or what gRPC says where it does not.
absl::Status AskHealth(const std::shared_ptr<grpc::Channel>& channel, absl::Duration timeout);

}  // namespace spillway
