#include "gpu/device/job_context.h"

#include "host/base/elements.h"
#include "host/base/status_macros.h"

namespace spillway::cuda {

LayerIndex& JobContext::index(size_t item) const {
  return static_cast<CudaSequence&>(*job_->items[item].sequence).layers[job_->layer];
}

void JobContext::ToFloats(size_t item, int64_t query, int kv_head, float* q) const {
  const AttendQuery& w = attend(item);
  const int64_t width = int64_t{spec().group()} * spec().head_dim;
  const int64_t at = query * spec().query_head_count * spec().head_dim + kv_head * width;
  ToFloat(w.q_dtype, w.q + at * DTypeBytes(w.q_dtype), width, q);
}

bool JobContext::Cancelled() const {
  // A stream slot takes so many launches: enqueuing may wait for the GPU.
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

void JobContext::CollectTimes() {
  float milliseconds = 0;
  if (cudaEventElapsedTime(&milliseconds, slot_->start(), slot_->done()) == cudaSuccess) {
    job_->device_time_us = 1000.0 * milliseconds;
  }
  cudaEvent_t before = slot_->start();
  for (const auto& [name, event] : marks_) {
    cudaEventElapsedTime(&milliseconds, before, event.get());
    job_->stages.push_back({name, 1000.0 * milliseconds});
    before = event.get();
  }
}

}  // namespace spillway::cuda
