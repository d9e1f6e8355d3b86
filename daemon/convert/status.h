// The one place where errors of the engine become errors of the API.
#pragma once

#include <string>

#include "absl/status/status.h"
#include "google/rpc/status.pb.h"
#include "grpcpp/support/status.h"

namespace spillway {

// Turns errors into google.rpc.Status with ErrorInfo (domain "spillway",
// reason, metadata with the daemon's boot_id) and BadRequest where fields are
// at fault. Thread-safe.
class StatusConverter {
 public:
  explicit StatusConverter(std::string boot_id) : boot_id_(std::move(boot_id)) {}

  google::rpc::Status ToRpc(const absl::Status& status) const;
  // The same as the status of a call, with its binary details.
  grpc::Status ToGrpc(const absl::Status& status) const;

 private:
  const std::string boot_id_;
};

}  // namespace spillway
