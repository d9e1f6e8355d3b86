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

// Converts errors to google.rpc.Status with ErrorInfo (domain "spillway", reason, metadata with the
// daemon's boot_id and store_id) and, if fields are wrong, BadRequest. Long texts are cut, and say
// so. Thread-safe.
class StatusConverter {
 public:
  // Adds details to an error, such as what holds the memory.
  using Explain = std::function<absl::Status(const absl::Status&)>;
  // Called with each error that is returned to a client, its reason, and the call's trace id
  // (Caller::trace()).
  using Note = std::function<void(const absl::Status& status, const std::string& reason,
                                  std::string_view trace)>;

  // explain and note must be thread-safe.
  StatusConverter(std::string boot_id, std::string store_id, Explain explain, Note note)
      : boot_id_(std::move(boot_id)),
        store_id_(std::move(store_id)),
        explain_(std::move(explain)),
        note_(std::move(note)) {}

  // trace: the call's trace id; empty: none.
  google::rpc::Status ToRpc(const absl::Status& status, std::string_view trace = {}) const;
  // The same as the gRPC status of a call, with the google.rpc.Status as binary details.
  grpc::Status ToGrpc(const absl::Status& status, std::string_view trace = {}) const;

 private:
  const std::string boot_id_;
  const std::string store_id_;  // empty: no store
  const Explain explain_;
  const Note note_;
};

}  // namespace spillway
