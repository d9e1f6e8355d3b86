#pragma once

#include "absl/status/status.h"
#include "gpu/device/append_pipeline.h"
#include "gpu/device/dense_pipeline.h"
#include "gpu/device/job_context.h"
#include "gpu/device/sparse_pipeline.h"

namespace spillway::cuda {

// One job on a stream slot: copies rows and enqueues work, then collects results once the slot's
// stream is done. Its pipelines run one after the other on the stream.
class JobRun {
 public:
  JobRun(Job* job, StreamSlot* slot, const Gpu& gpu) : context_(job, slot, gpu) {}
  JobRun(const JobRun&) = delete;
  JobRun& operator=(const JobRun&) = delete;

  // Enqueues all work of the GPU. An error concerns the whole job. Even then, the caller must wait
  // for the slot's stream before it destroys this object.
  absl::Status Enqueue();
  // Whether Enqueue() got the memory that it needs. If not, nothing has changed.
  bool reserved() const { return reserved_; }
  // Whether the job's attends are cancelled or late. If so, tells the kernels.
  bool Cancelled() { return context_.Cancelled(); }
  // Sets the results and statuses of the items, once the GPU is done.
  void Collect();

 private:
  // Assigns the items' queries to the pipelines.
  void Plan();
  // Gets memory for all attends. RESOURCE_EXHAUSTED changes nothing.
  absl::Status Reserve();
  absl::Status EnqueuePipelines();
  bool attends() const { return !sparse_.empty() || !dense_.empty(); }
  // Adds the times of stages between two events.
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
