#pragma once

#include "absl/status/status.h"
#include "gpu/device/append_pipeline.h"
#include "gpu/device/dense_pipeline.h"
#include "gpu/device/job_context.h"
#include "gpu/device/sparse_pipeline.h"

namespace spillway::cuda {

// One job on its way through a stream slot: rows copied and work enqueued,
// then, once the slot's stream is done, results collected. Its pipelines follow
// each other on the stream.
class JobRun {
 public:
  JobRun(Job* job, StreamSlot* slot, const Gpu& gpu) : context_(job, slot, gpu) {}
  JobRun(const JobRun&) = delete;
  JobRun& operator=(const JobRun&) = delete;

  // Everything that the GPU is to do. The caller waits for the slot's stream
  // before it ends the run, also after an error, which is of the whole job.
  absl::Status Enqueue();
  // Whether Enqueue() found the memory that it needs. Without it nothing has changed.
  bool reserved() const { return reserved_; }
  // Whether nobody waits for the job's attends any more. Tells the kernels.
  bool Cancelled() { return context_.Cancelled(); }
  // Results and statuses of the items, once the GPU is done.
  void Collect();

 private:
  // Hands the items' queries to the pipelines.
  void Plan();
  // Memory for all attends. RESOURCE_EXHAUSTED, and then nothing has changed.
  absl::Status Reserve();
  absl::Status EnqueuePipelines();
  bool attends() const { return !sparse_.empty() || !dense_.empty(); }
  // Times of what events stand around.
  void CollectStages();

  JobContext context_;
  AppendPipeline append_{&context_};
  SparsePipeline sparse_{&context_};
  DensePipeline dense_{&context_};
  std::byte* pinned_ = nullptr;
  std::byte* workspace_ = nullptr;
  bool reserved_ = false;
};

}  // namespace spillway::cuda
