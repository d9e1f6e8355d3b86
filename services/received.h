#pragma once

#include <atomic>
#include <cstdint>
#include <string>
#include <utility>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "engine/caller.h"
#include "google/protobuf/message_lite.h"
#include "grpcpp/impl/codegen/serialization_traits.h"
#include "grpcpp/support/byte_buffer.h"
#include "host/memory/memory_budget.h"

namespace spillway {

// Messages reach the handlers as bytes. If gRPC parsed them, a message that does not parse would
// end a stream as if the client had ended it, and a unary call without an explanation. Also, its
// size would be known only after it is in memory twice (docs/adr/0044).

// Charges the memory of a message until the reservation is released. RESOURCE_EXHAUSTED if it does
// not fit.
absl::StatusOr<MemoryReservation> ChargeMessage(const grpc::ByteBuffer& bytes,
                                                MemoryBudget& budget);

// Parses the message and frees its bytes. INVALID_ARGUMENT, reason MESSAGE_UNREADABLE, names the
// type of the message if it does not parse, or has more fields than any request needs. inner:
// number of a submessage whose fields are counted too; 0: none.
absl::Status ParseMessage(grpc::ByteBuffer& bytes, google::protobuf::MessageLite& message,
                          int inner = 0);

// The request of a unary call or of a call that is answered by a stream, and who sent it. It is
// charged from Open() until gRPC has finished the call.
template <typename T>
class Received {
 public:
  Received() = default;
  ~Received() {
    if (open_count_ != nullptr) --*open_count_;
  }
  Received(const Received&) = delete;
  Received& operator=(const Received&) = delete;

  // Set before anything else is called. open_count: counts the call until its end; may be null.
  void LetIn(absl::StatusOr<Caller> caller, std::atomic<int64_t>* open_count) {
    caller_ = std::move(caller);
    open_count_ = open_count;
    if (open_count_ != nullptr) ++*open_count_;
  }
  // An error if the call must be refused. Then there may be no request.
  const absl::StatusOr<Caller>& caller() const { return caller_; }

  // Charges and parses the request. The message lives as long as this object. Errors as above. Call
  // it only once.
  absl::StatusOr<const T*> Open(MemoryBudget& budget) {
    absl::StatusOr<MemoryReservation> reservation = ChargeMessage(bytes_, budget);
    if (!reservation.ok()) return reservation.status();
    reservation_ = *std::move(reservation);
    if (absl::Status status = ParseMessage(bytes_, message_); !status.ok()) return status;
    return &message_;
  }
  void Take(grpc::ByteBuffer* bytes) { bytes_.Swap(bytes); }

 private:
  absl::StatusOr<Caller> caller_;
  std::atomic<int64_t>* open_count_ = nullptr;
  grpc::ByteBuffer bytes_;
  MemoryReservation reservation_;
  T message_;
};

}  // namespace spillway

namespace grpc {

// Makes gRPC pass the bytes unparsed.
template <typename T>
class SerializationTraits<spillway::Received<T>, void> {
 public:
  static Status Deserialize(ByteBuffer* bytes, spillway::Received<T>* received) {
    received->Take(bytes);
    return Status::OK;
  }
};

}  // namespace grpc
