#pragma once

#include <memory>
#include <string>
#include <string_view>

#include "absl/status/statusor.h"
#include "daemon/convert/status.h"
#include "daemon/engine/caller.h"
#include "daemon/engine/step.h"
#include "daemon/engine/stream_decoder.h"
#include "spillway/v1/attention_service.pb.h"

namespace spillway {

// A serialised v1::DecodeStep. INVALID_ARGUMENT.
absl::StatusOr<v1::DecodeStep> ParseDecodeStep(std::string_view description);

// By what the log names the step: its own trace, or else its caller's. Also of a step that is
// refused.
std::string TraceOf(const Caller& caller, const v1::DecodeStep& step);

// A step as a client describes it. INVALID_ARGUMENT names the field, NOT_FOUND
// the sequence.
absl::StatusOr<std::unique_ptr<Step>> StepFromProto(Engine& engine, const Caller& caller,
                                                    const v1::DecodeStep& step);

// A decoder of the sequences that are described, token by token.
absl::StatusOr<std::unique_ptr<StreamDecoder>> DecoderFromProto(Engine& engine,
                                                                const Caller& caller,
                                                                const v1::DecodeStep& step,
                                                                int64_t token_count_max);

// What a step's attend said beside its outputs: for each part status, certificate and
// statistics. Nothing of a null one.
v1::AttendResponse ResultsOf(const Job* job, const StatusConverter& status);

}  // namespace spillway
