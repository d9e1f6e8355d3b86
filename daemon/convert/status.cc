#include "daemon/convert/status.h"

#include <array>

#include "daemon/engine/errors.h"
#include "google/rpc/error_details.pb.h"

namespace spillway {
namespace {

// absl's codes and gRPC's are the same numbers (google.rpc.Code); the names
// double as reason where an error carries none of its own.
constexpr std::array<const char*, 17> kCodeNames = {
    "OK",
    "CANCELLED",
    "UNKNOWN",
    "INVALID_ARGUMENT",
    "DEADLINE_EXCEEDED",
    "NOT_FOUND",
    "ALREADY_EXISTS",
    "PERMISSION_DENIED",
    "RESOURCE_EXHAUSTED",
    "FAILED_PRECONDITION",
    "ABORTED",
    "OUT_OF_RANGE",
    "UNIMPLEMENTED",
    "INTERNAL",
    "UNAVAILABLE",
    "DATA_LOSS",
    "UNAUTHENTICATED",
};

}  // namespace

google::rpc::Status StatusConverter::ToRpc(const absl::Status& plain) const {
  google::rpc::Status rpc;
  if (plain.ok()) return rpc;
  const absl::Status status = explain_(plain);
  const int code = static_cast<int>(status.code());
  rpc.set_code(code);
  rpc.set_message(std::string(status.message()));
  const ErrorDetails details = DetailsOf(status);
  google::rpc::ErrorInfo info;
  info.set_domain("spillway");
  info.set_reason(details.reason.empty() ? kCodeNames.at(code) : details.reason);
  note_(status, info.reason());
  for (const auto& [key, value] : details.metadata) (*info.mutable_metadata())[key] = value;
  (*info.mutable_metadata())["boot_id"] = boot_id_;
  rpc.add_details()->PackFrom(info);
  if (!details.fields.empty()) {
    google::rpc::BadRequest bad_request;
    for (const FieldError& field : details.fields) {
      auto* violation = bad_request.add_field_violations();
      violation->set_field(field.field);
      violation->set_description(field.description);
    }
    rpc.add_details()->PackFrom(bad_request);
  }
  return rpc;
}

grpc::Status StatusConverter::ToGrpc(const absl::Status& status) const {
  if (status.ok()) return grpc::Status::OK;
  const google::rpc::Status rpc = ToRpc(status);
  return grpc::Status(static_cast<grpc::StatusCode>(rpc.code()), rpc.message(),
                      rpc.SerializeAsString());
}

}  // namespace spillway
