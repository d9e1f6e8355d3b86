#pragma once

#include <string>
#include <utility>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "google/protobuf/message_lite.h"
#include "grpcpp/impl/codegen/serialization_traits.h"
#include "grpcpp/support/byte_buffer.h"
#include "host/memory/memory_budget.h"

namespace spillway {

// Messages reach handlers as bytes. Where gRPC parses them itself, one that does not parse ends
// a stream as if the client had ended it, and a unary call without a word; and nothing is known
// of its size before it is in memory twice (docs/adr/0044).

// Charges what a message takes until it is done. RESOURCE_EXHAUSTED.
absl::StatusOr<MemoryReservation> ChargeMessage(const grpc::ByteBuffer& bytes,
                                                MemoryBudget& budget);

// Parses the message, and lets its bytes go. INVALID_ARGUMENT, reason MESSAGE_UNREADABLE, names
// its type: it does not parse, or has more fields than any request needs.
absl::Status ParseMessage(grpc::ByteBuffer& bytes, google::protobuf::MessageLite& message);

// The request of a unary call, or of one that is answered by a stream. It is charged from its
// opening until gRPC is done with the call.
template <typename T>
class Received {
 public:
  // Charges and parses it, once. The message lives as long as this. Errors as above.
  absl::StatusOr<const T*> Open(MemoryBudget& budget) {
    absl::StatusOr<MemoryReservation> reservation = ChargeMessage(bytes_, budget);
    if (!reservation.ok()) return reservation.status();
    reservation_ = *std::move(reservation);
    if (absl::Status status = ParseMessage(bytes_, message_); !status.ok()) return status;
    return &message_;
  }
  void Take(grpc::ByteBuffer* bytes) { bytes_.Swap(bytes); }

 private:
  grpc::ByteBuffer bytes_;
  MemoryReservation reservation_;
  T message_;
};

}  // namespace spillway

namespace grpc {

// How gRPC hands one over: as it is.
template <typename T>
class SerializationTraits<spillway::Received<T>, void> {
 public:
  static Status Deserialize(ByteBuffer* bytes, spillway::Received<T>* received) {
    received->Take(bytes);
    return Status::OK;
  }
};

}  // namespace grpc
