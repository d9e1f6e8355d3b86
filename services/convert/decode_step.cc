#include "services/convert/decode_step.h"

#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "engine/errors.h"
#include "host/base/status_macros.h"
#include "services/convert/attend.h"
#include "services/convert/lookup.h"
#include "services/convert/policy.h"
#include "services/convert/trace.h"

namespace spillway {

namespace {

absl::StatusOr<std::vector<Step::Part>> PartsFromProto(Engine& engine, const Caller& caller,
                                                       const v1::DecodeStep& step) {
  RETURN_IF_ERROR(CheckTraceId(step.trace_id()));
  std::vector<Step::Part> parts;
  for (int i = 0; i < step.parts_size() && i <= kAttendItemCountMax; ++i) {
    const std::string path = absl::StrCat("parts[", i, "].");
    const v1::DecodeStep::Part& named = step.parts(i);
    Step::Part& part = parts.emplace_back();
    ASSIGN_OR_RETURN(part.sequence,
                     FindSequence(engine, caller, named.sequence(), path + "sequence"));
    part.start = named.token_start();
    part.generation = named.generation();
    part.policy = part.sequence->policy;
    if (part.start < 0) {
      return InvalidField(path + "token_start", absl::StrCat("value ", part.start, " is negative"));
    }
    if (step.has_policy()) {
      ASSIGN_OR_RETURN(part.policy, ApplyPolicy(step.policy(), part.policy,
                                                part.sequence->model->spec, "policy."));
    }
  }
  return parts;
}

}  // namespace

absl::StatusOr<v1::DecodeStep> ParseDecodeStep(std::string_view description) {
  v1::DecodeStep step;
  if (step.ParseFromArray(description.data(), static_cast<int>(description.size()))) return step;
  return absl::InvalidArgumentError(
      "the step's description is not a serialised spillway.v1.DecodeStep");
}

std::string TraceOf(const Caller& caller, const v1::DecodeStep& step) {
  std::string trace = RequestIdOf(step.trace_id());
  return trace.empty() ? caller.trace() : trace;
}

absl::StatusOr<std::unique_ptr<Step>> StepFromProto(Engine& engine, const Caller& caller,
                                                    const v1::DecodeStep& step) {
  ASSIGN_OR_RETURN(std::vector<Step::Part> parts, PartsFromProto(engine, caller, step));
  return Step::Create(&engine, std::move(parts), step.token_count(), TraceOf(caller, step));
}

absl::StatusOr<std::unique_ptr<StreamDecoder>> DecoderFromProto(Engine& engine,
                                                                const Caller& caller,
                                                                const v1::DecodeStep& step,
                                                                int64_t token_count_max) {
  ASSIGN_OR_RETURN(std::vector<Step::Part> parts, PartsFromProto(engine, caller, step));
  return StreamDecoder::Create(&engine, std::move(parts), step.token_count(), token_count_max);
}

v1::AttendResponse ResultsOf(const Job* job, const StatusConverter& status,
                             std::string_view trace) {
  v1::AttendResponse response;
  if (job == nullptr) return response;
  for (const JobItem& item : job->items) {
    v1::AttendResult& result = *response.add_results();
    if (item.status.ok()) {
      FillFacts(*job, item, result);
    } else {
      *result.mutable_status() = status.ToRpc(item.status, trace);
    }
  }
  return response;
}

}  // namespace spillway
