#include "daemon/services/received.h"

#include "absl/strings/str_cat.h"
#include "daemon/engine/errors.h"
#include "google/protobuf/io/coded_stream.h"
#include "google/protobuf/wire_format_lite.h"
#include "grpcpp/support/proto_buffer_reader.h"

namespace spillway {
namespace {

// Even an empty submessage takes the memory of its object, and a message of 4 MiB could contain two
// million of them.
constexpr int kFieldCountMax = 16384;

absl::Status Unreadable(const google::protobuf::MessageLite& message, const std::string& why) {
  return WithReason(absl::InvalidArgumentError(absl::StrCat("the message is not a valid ",
                                                            message.GetTypeName(), ": ", why)),
                    "MESSAGE_UNREADABLE", {{"message", message.GetTypeName()}});
}

// Whether the message has more fields than any request needs. Skips the contents of the fields.
bool HasTooManyFields(grpc::ByteBuffer& bytes) {
  grpc::ProtoBufferReader reader(&bytes);
  if (!reader.status().ok()) return false;
  google::protobuf::io::CodedInputStream input(&reader);
  for (int count = 0;; ++count) {
    const uint32_t tag = input.ReadTag();
    if (tag == 0 || !google::protobuf::internal::WireFormatLite::SkipField(&input, tag)) {
      return false;
    }
    if (count == kFieldCountMax) return true;
  }
}

}  // namespace

absl::StatusOr<MemoryReservation> ChargeMessage(const grpc::ByteBuffer& bytes,
                                                MemoryBudget& budget) {
  return budget.Reserve(bytes.Valid() ? static_cast<int64_t>(bytes.Length()) : 0, "a request",
                        MemoryUse::kMessages);
}

absl::Status ParseMessage(grpc::ByteBuffer& bytes, google::protobuf::MessageLite& message) {
  if (!bytes.Valid()) return Unreadable(message, "there are no bytes");
  if (HasTooManyFields(bytes)) {
    return Unreadable(message, absl::StrCat("it has more than ", kFieldCountMax, " fields"));
  }
  bool parsed = false;
  {
    grpc::ProtoBufferReader reader(&bytes);
    parsed = reader.status().ok() && message.ParseFromZeroCopyStream(&reader);
  }
  const size_t length = bytes.Length();
  bytes.Clear();
  if (parsed) return absl::OkStatus();
  // gRPC passes on compressed messages as they are.
  return Unreadable(
      message, absl::StrCat("its ", length, " bytes do not parse; compression is not supported"));
}

}  // namespace spillway
