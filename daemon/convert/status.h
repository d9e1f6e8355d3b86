// The one place where errors of the engine become errors of the API.
#pragma once

#include <functional>
#include <string>
#include <string_view>
#include <utility>

#include "absl/status/status.h"
#include "google/rpc/status.pb.h"
#include "grpcpp/support/status.h"

namespace spillway {

// Turns errors into google.rpc.Status with ErrorInfo (domain "spillway",
// reason, metadata with the daemon's boot_id and store_id) and BadRequest where fields are
// at fault. Long texts are cut, and say so. Thread-safe.
class StatusConverter {
 public:
  // Says more of an error.
  using Explain = std::function<absl::Status(const absl::Status&)>;
  // Takes note of an error that is answered, with its reason, and its call's trace
  // (Caller::trace()).
  using Note = std::function<void(const absl::Status& status, const std::string& reason,
                                  std::string_view trace)>;

  // Both are thread-safe.
  StatusConverter(std::string boot_id, std::string store_id, Explain explain, Note note)
      : boot_id_(std::move(boot_id)),
        store_id_(std::move(store_id)),
        explain_(std::move(explain)),
        note_(std::move(note)) {}

  // trace: of the call; empty where it does not say.
  google::rpc::Status ToRpc(const absl::Status& status, std::string_view trace = {}) const;
  // The same as the status of a call, with its binary details.
  grpc::Status ToGrpc(const absl::Status& status, std::string_view trace = {}) const;

 private:
  const std::string boot_id_;
  const std::string store_id_;  // or empty
  const Explain explain_;
  const Note note_;
};

}  // namespace spillway
