#include "spillway/error.h"

#include <optional>

#include "absl/strings/cord.h"
#include "absl/strings/str_cat.h"
#include "google/rpc/error_details.pb.h"

namespace spillway {
namespace {

// The type URL that google::protobuf::Any writes.
template <typename Message>
std::string TypeUrl() {
  return absl::StrCat("type.googleapis.com/", Message().GetTypeName());
}

template <typename Message>
std::optional<Message> Detail(const absl::Status& status) {
  const auto payload = status.GetPayload(TypeUrl<Message>());
  Message message;
  if (!payload.has_value() || !message.ParseFromString(std::string(*payload))) return std::nullopt;
  return message;
}

void SetDetails(const google::rpc::Status& source, absl::Status& status) {
  for (const auto& detail : source.details()) {
    status.SetPayload(detail.type_url(), absl::Cord(detail.value()));
  }
}

}  // namespace

absl::Status ToAbslStatus(const grpc::Status& status) {
  if (status.ok()) return absl::OkStatus();
  absl::Status result(static_cast<absl::StatusCode>(status.error_code()), status.error_message());
  google::rpc::Status details;
  if (details.ParseFromString(status.error_details())) SetDetails(details, result);
  return result;
}

absl::Status ToAbslStatus(const google::rpc::Status& status) {
  absl::Status result(static_cast<absl::StatusCode>(status.code()), status.message());
  if (!result.ok()) SetDetails(status, result);
  return result;
}

std::string ErrorReason(const absl::Status& status) {
  const auto info = Detail<google::rpc::ErrorInfo>(status);
  return info.has_value() ? info->reason() : "";
}

std::map<std::string, std::string> ErrorMetadata(const absl::Status& status) {
  const auto info = Detail<google::rpc::ErrorInfo>(status);
  if (!info.has_value()) return {};
  return {info->metadata().begin(), info->metadata().end()};
}

std::vector<FieldViolation> FieldViolations(const absl::Status& status) {
  std::vector<FieldViolation> violations;
  if (const auto request = Detail<google::rpc::BadRequest>(status)) {
    for (const auto& violation : request->field_violations()) {
      violations.push_back({violation.field(), violation.description()});
    }
  }
  return violations;
}

}  // namespace spillway
