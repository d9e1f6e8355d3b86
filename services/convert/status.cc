#include "services/convert/status.h"

#include <array>
#include <string_view>

#include "absl/strings/str_cat.h"
#include "engine/errors.h"
#include "google/rpc/error_details.pb.h"

namespace spillway {
namespace {

// absl and gRPC use the same numbers of codes (google.rpc.Code). If an error has no reason of its
// own, the name of its code is the reason.
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

// Size of one error, at most: clients refuse headers of more than 8 KiB, in which the message
// occurs twice.
constexpr size_t kMessageCharsMax = 1024;
constexpr size_t kDetailCharsMax = 256;
constexpr size_t kFieldsBytesMax = 1536;  // the last field may exceed it

// The text, or, if it is too long, its beginning and its length.
std::string Cut(std::string_view text, size_t chars_max) {
  if (text.size() <= chars_max) return std::string(text);
  size_t end = chars_max;
  // Not within a UTF-8 character.
  while (end > 0 && (static_cast<unsigned char>(text[end]) & 0xC0) == 0x80) --end;
  return absl::StrCat(std::string(text.substr(0, end)), "... (cut, of ", text.size(), " bytes)");
}

}  // namespace

google::rpc::Status StatusConverter::ToRpc(const absl::Status& plain,
                                           std::string_view trace) const {
  google::rpc::Status rpc;
  if (plain.ok()) return rpc;
  absl::Status status = explain_(plain);
  const std::string_view message(status.message().data(), status.message().size());
  if (message.size() > kMessageCharsMax) {
    status = WithMessage(status, Cut(message, kMessageCharsMax));
  }
  const int code = static_cast<int>(status.code());
  rpc.set_code(code);
  rpc.set_message(std::string(status.message()));
  const ErrorDetails details = DetailsOf(status);
  google::rpc::ErrorInfo info;
  info.set_domain("spillway");
  info.set_reason(details.reason.empty() ? kCodeNames.at(code) : details.reason);
  note_(status, info.reason(), trace);
  for (const auto& [key, value] : details.metadata) {
    (*info.mutable_metadata())[key] = Cut(value, kDetailCharsMax);
  }
  (*info.mutable_metadata())["boot_id"] = boot_id_;
  if (!store_id_.empty()) (*info.mutable_metadata())["store_id"] = store_id_;
  rpc.add_details()->PackFrom(info);
  if (!details.fields.empty()) {
    google::rpc::BadRequest bad_request;
    for (const FieldError& field : details.fields) {
      if (bad_request.ByteSizeLong() > kFieldsBytesMax) break;
      auto* violation = bad_request.add_field_violations();
      violation->set_field(Cut(field.field, kDetailCharsMax));
      violation->set_description(Cut(field.description, kDetailCharsMax));
    }
    rpc.add_details()->PackFrom(bad_request);
  }
  return rpc;
}

grpc::Status StatusConverter::ToGrpc(const absl::Status& status, std::string_view trace) const {
  if (status.ok()) return grpc::Status::OK;
  const google::rpc::Status rpc = ToRpc(status, trace);
  return grpc::Status(static_cast<grpc::StatusCode>(rpc.code()), rpc.message(),
                      rpc.SerializeAsString());
}

}  // namespace spillway
