#include "gpu/device/job_context.h"

#include <algorithm>

#include "absl/strings/str_cat.h"
#include "host/base/elements.h"
#include "host/base/status_macros.h"
#include "host/device/errors.h"
#include "host/device/results.h"

namespace spillway::cuda {

LayerIndex& JobContext::index(size_t item) const {
  return static_cast<CudaSequence&>(*job_->items[item].sequence).layers[job_->layer];
}

int64_t JobContext::unit_count() const {
  int64_t queries = 0;
  for (const JobItem& item : job_->items) {
    if (item.attend.has_value()) queries += item.attend->query_count;
  }
  return std::max<int64_t>(1, queries * spec().group_count());
}

void JobContext::ToFloats(size_t item, int64_t query, int group_index, float* q) const {
  const AttendQuery& w = attend(item);
  const int64_t width = int64_t{spec().group()} * spec().head_dim;
  const int64_t at = query * spec().query_head_count * spec().head_dim + group_index * width;
  ToFloat(w.q_dtype, w.q + at * DTypeBytes(w.q_dtype), width, q);
}

bool JobContext::Cancelled() const {
  if (step_ != nullptr) return false;
  // Called between launches: a stream takes only so many, so enqueuing may wait for the GPU.
  if (job_->cancel != nullptr && !job_->cancel->Check().ok()) *slot_->cancel() = 1;
  return *slot_->cancel() != 0;
}

absl::Status JobContext::Mark(std::string_view stage) {
  if (!job_->trace) return absl::OkStatus();
  ASSIGN_OR_RETURN(Event event, Event::Create(/*timing=*/true));
  SPILLWAY_CUDA_RETURN_IF_ERROR(cudaEventRecord(event.get(), stream()));
  marks_.emplace_back(stage, std::move(event));
  return absl::OkStatus();
}

void JobContext::AddStage(JobStage stage, cudaEvent_t from, cudaEvent_t to) {
  float milliseconds = 0;
  if (cudaEventElapsedTime(&milliseconds, from, to) == cudaSuccess) {
    stages_.Add(stage, 1000.0 * milliseconds);
  }
}

void JobContext::CollectTimes() {
  if (step_ != nullptr) {
    // A step has no timing events: its stream is the caller's.
    job_->device_time_us = stages_.waves_us();
    job_->stages = stages_.Named();
    return;
  }
  float milliseconds = 0;
  if (cudaEventElapsedTime(&milliseconds, slot_->start(), slot_->done()) == cudaSuccess) {
    job_->device_time_us = 1000.0 * milliseconds;
  }
  if (!job_->trace) {
    job_->stages = stages_.Named();
    return;
  }
  cudaEvent_t before = slot_->start();
  for (const auto& [name, event] : marks_) {
    cudaEventElapsedTime(&milliseconds, before, event.get());
    job_->stages.push_back({name, 1000.0 * milliseconds});
    before = event.get();
  }
}

absl::Status JobContext::CheckReport(const StepReport& report, size_t item, int64_t query,
                                     int group_index) const {
  if (step_ == nullptr) return absl::OkStatus();
  if (report.number != step_->number) {
    return absl::FailedPreconditionError(
        absl::StrCat("layer ", layer(), " was not attended in the step"));
  }
  step_->ran = true;
  if (report.version != step_->tensors.check.version) {
    return absl::FailedPreconditionError(absl::StrCat(
        "layer ", layer(), " ran a graph of version ", report.version, " of the step, which is at ",
        step_->tensors.check.version, ": capture it again where the version changes"));
  }
  if (report.bad != 0) {
    const BadElementPlace bad = PlaceOf(report.bad);
    if (bad.input == StepInput::kQ) {
      return absl::OutOfRangeError(absl::StrCat("q is not finite at layer ", layer(), ", query ",
                                                bad.token, ", query head ", bad.head, ", element ",
                                                bad.element));
    }
    const int64_t first = job_->items[item].append->start;
    return NonFiniteRowError(bad.input == StepInput::kK ? "K" : "V", layer(), bad.head,
                             static_cast<uint64_t>(first + bad.token), bad.element);
  }
  for (int row = 0; row < kStepReportHeads; ++row) {
    if (report.overflow[row] == 0) continue;
    return NonFiniteOutputError(query + row / spec().group(),
                                group_index * spec().group() + row % spec().group(), layer());
  }
  return absl::OkStatus();
}

}  // namespace spillway::cuda
