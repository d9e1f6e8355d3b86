#pragma once

#include <memory>

#include "absl/status/statusor.h"
#include "daemon/convert/status.h"
#include "daemon/engine/step.h"
#include "spillway/v1/attention_service.pb.h"

namespace spillway {

// A step as a client describes it. INVALID_ARGUMENT names the field, NOT_FOUND
// the sequence.
absl::StatusOr<std::unique_ptr<Step>> StepFromProto(Engine& engine, const v1::DecodeStep& step);

// What a step's last attend said beside its outputs: for each part status,
// certificate and statistics. Nothing before the first.
v1::AttendResponse ResultsOf(const Step& step, const StatusConverter& status);

}  // namespace spillway
