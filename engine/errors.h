// Details that an engine error carries beside its code and message, as
// payloads of absl::Status. services/convert/status.h turns them into
// google.rpc.ErrorInfo and google.rpc.BadRequest.
#pragma once

#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "engine/reason.h"
#include "host/model/model_spec.h"

namespace spillway {

struct ErrorDetails {
  std::string reason;                                         // UPPER_SNAKE_CASE
  std::vector<std::pair<std::string, std::string>> metadata;  // by key
  std::vector<FieldError> fields;                             // in order
};

// Adds a reason for programs, and values that belong to it.
absl::Status WithReason(absl::Status status, Reason reason,
                        const std::vector<std::pair<std::string, std::string>>& metadata = {});
// The same code and details with another message.
absl::Status WithMessage(const absl::Status& status, std::string_view message);
// Adds values that belong to the error.
absl::Status WithMetadata(absl::Status status,
                          const std::vector<std::pair<std::string, std::string>>& metadata);
// Adds the fields that are wrong.
absl::Status WithFields(absl::Status status, const std::vector<FieldError>& fields);
// INVALID_ARGUMENT, reason INVALID_FIELD, naming every field. REQUIRES: at least one field.
absl::Status InvalidFields(const std::vector<FieldError>& fields);
absl::Status InvalidField(std::string field, std::string description);

// NOT_FOUND, reasons MODEL_NOT_FOUND and SEQUENCE_NOT_FOUND.
absl::Status ModelNotFound(std::string_view name);
absl::Status SequenceNotFound(std::string_view name);
// FAILED_PRECONDITION, reason SEQUENCE_HELD: a decoder on a stream holds the sequence.
absl::Status SequenceHeld(std::string_view name);
// FAILED_PRECONDITION, reasons SEQUENCE_SEALED and SEQUENCE_NOT_SEALED.
absl::Status SequenceSealed(std::string_view name);
absl::Status SequenceNotSealed(std::string_view name);

ErrorDetails DetailsOf(const absl::Status& status);

}  // namespace spillway
