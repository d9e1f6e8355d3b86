#pragma once

#include <memory>
#include <string>
#include <string_view>

#include "absl/status/statusor.h"
#include "engine/caller.h"
#include "engine/step.h"
#include "engine/stream_decoder.h"
#include "host/device/step_layout.h"
#include "services/convert/status.h"
#include "services/convert/tensor.h"
#include "spillway/v1/attention_service.pb.h"

namespace spillway {

// Parses a serialised v1::DecodeStep. INVALID_ARGUMENT.
absl::StatusOr<v1::DecodeStep> ParseDecodeStep(std::string_view description);

// The trace id with which the log names the step: its own, or else its caller's. Also for a step
// that is refused.
std::string TraceOf(const Caller& caller, const v1::DecodeStep& step);

// Creates a step as a client describes it. INVALID_ARGUMENT names the field, NOT_FOUND the
// sequence.
absl::StatusOr<std::unique_ptr<Step>> StepFromProto(Engine& engine, const Caller& caller,
                                                    const v1::DecodeStep& step);

// Creates a decoder for steps of these sequences. Errors also as StreamDecoder::Create().
absl::StatusOr<std::unique_ptr<StreamDecoder>> DecoderFromProto(Engine& engine,
                                                                const Caller& caller,
                                                                const v1::DecodeStep& step,
                                                                int64_t token_count_max);

// Shape of the tensors of a step or a decoder.
template <typename T>
StepShape ShapeOf(const T& of) {
  const ModelSpec& spec = of.model().spec;
  return {of.part_count(),       static_cast<int32_t>(of.token_count()),
          spec.query_head_count, spec.kv_head_count,
          spec.head_dim,         static_cast<uint32_t>(ToProto(spec.dtype))};
}

// The results of a step's attend without its outputs: status, certificate and statistics of each
// part. Empty if job is null. trace: for the log of the parts that failed.
v1::AttendResponse ResultsOf(const Job* job, const StatusConverter& status,
                             std::string_view trace = {});

}  // namespace spillway
