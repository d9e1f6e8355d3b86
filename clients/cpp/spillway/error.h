// Errors of the client: absl::Status with the daemon's details as payloads.
//
// If a call fails, its status has the gRPC code and the daemon's message. The
// google.rpc details are payloads, with their type URLs as keys. The functions
// here read these details.
#pragma once

#include <map>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "google/rpc/status.pb.h"
#include "grpcpp/support/status.h"

namespace spillway {

// A request field that the daemon refused, from google.rpc.BadRequest.
struct FieldViolation {
  // Path of the field, for example "model.head_dim".
  std::string field;
  // What is wrong, with the value and the limit.
  std::string description;
};

// The status of a call, from gRPC's status. Details that do not parse as
// google.rpc.Status are dropped. Code and message are kept.
absl::Status ToAbslStatus(const grpc::Status& status);

// The status of one item of an Attend or one answer of a Decode.
absl::Status ToAbslStatus(const google::rpc::Status& status);

// Reason in the google.rpc.ErrorInfo, for example "SEQUENCE_NOT_FOUND"; empty
// if the status has none.
std::string ErrorReason(const absl::Status& status);

// Metadata in the google.rpc.ErrorInfo, for example {"boot_id", ...}.
std::map<std::string, std::string> ErrorMetadata(const absl::Status& status);

// Refused fields; empty if the status has no google.rpc.BadRequest.
std::vector<FieldViolation> FieldViolations(const absl::Status& status);

}  // namespace spillway
