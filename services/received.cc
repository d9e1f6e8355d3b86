#include "services/received.h"

#include "absl/strings/str_cat.h"
#include "engine/errors.h"
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
                    Reason::kMessageUnreadable, {{"message", message.GetTypeName()}});
}

// Counts the fields up to the end or the limit of `input`, and those in its submessages with the
// number `inner`. Stops at an error, which parsing finds again, and beyond kFieldCountMax.
void CountFields(google::protobuf::io::CodedInputStream& input, int inner, int& count) {
  using WireFormat = google::protobuf::internal::WireFormatLite;
  while (count <= kFieldCountMax) {
    const uint32_t tag = input.ReadTag();
    if (tag == 0) return;
    ++count;
    const bool enter = WireFormat::GetTagFieldNumber(tag) == inner &&
                       WireFormat::GetTagWireType(tag) == WireFormat::WIRETYPE_LENGTH_DELIMITED;
    if (!enter) {
      if (!WireFormat::SkipField(&input, tag)) return;
      continue;
    }
    int length = 0;
    if (!input.ReadVarintSizeAsInt(&length)) return;
    const auto limit = input.PushLimit(length);
    CountFields(input, /*inner=*/0, count);
    if (input.BytesUntilLimit() > 0 && !input.Skip(input.BytesUntilLimit())) return;
    input.PopLimit(limit);
  }
}

// Whether the message has more fields than any request needs. Skips the contents of all others.
bool HasTooManyFields(grpc::ByteBuffer& bytes, int inner) {
  grpc::ProtoBufferReader reader(&bytes);
  if (!reader.status().ok()) return false;
  google::protobuf::io::CodedInputStream input(&reader);
  int count = 0;
  CountFields(input, inner, count);
  return count > kFieldCountMax;
}

}  // namespace

absl::StatusOr<MemoryReservation> ChargeMessage(const grpc::ByteBuffer& bytes,
                                                MemoryBudget& budget) {
  return budget.Reserve(bytes.Valid() ? static_cast<int64_t>(bytes.Length()) : 0, "a request",
                        MemoryUse::kMessages);
}

absl::Status ParseMessage(grpc::ByteBuffer& bytes, google::protobuf::MessageLite& message,
                          int inner) {
  if (!bytes.Valid()) return Unreadable(message, "there are no bytes");
  if (HasTooManyFields(bytes, inner)) {
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
