#pragma once

#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "gpu/cuda/stream.h"
#include "gpu/device/sequence.h"
#include "gpu/device/stream_slot.h"

namespace spillway::cuda {

// What launches depend on.
struct Gpu {
  int sm_count = 0;
  int block_shared_bytes = 0;  // that a block can have
  // Compute capability 9.0: bulk copies, and kernels that begin early.
  bool hopper = false;
  std::string_view name = {};  // of the device, "cuda:0"; outlives jobs
};

inline int64_t RoundUp(int64_t x, int64_t step) { return (x + step - 1) / step * step; }

// A job on a stream slot: what its pipelines share. Used by one thread at a
// time.
class JobContext {
 public:
  JobContext(Job* job, StreamSlot* slot, const Gpu& gpu) : job_(job), slot_(slot), gpu_(gpu) {}

  Job& job() const { return *job_; }
  StreamSlot& slot() const { return *slot_; }
  cudaStream_t stream() const { return slot_->stream(); }
  const Gpu& gpu() const { return gpu_; }
  const CudaModel& model() const { return static_cast<const CudaModel&>(*job_->model); }
  const ModelSpec& spec() const { return model().spec(); }
  int layer() const { return job_->layer; }

  JobItem& item(size_t item) const { return job_->items[item]; }
  // REQUIRES: the item attends.
  const AttendQuery& attend(size_t item) const { return *job_->items[item].attend; }
  LayerIndex& index(size_t item) const;
  // The query heads of a KV head: q [G][d].
  void ToFloats(size_t item, int64_t query, int kv_head, float* q) const;

  // Whether nobody waits for the job's attends any more. Tells the kernels.
  bool Cancelled() const;
  // What was enqueued since the mark before is a stage, if the job asks.
  absl::Status Mark(std::string_view stage);
  // Fills in the job's times, once the GPU is done.
  void CollectTimes();

 private:
  Job* const job_;
  StreamSlot* const slot_;
  const Gpu gpu_;
  std::vector<std::pair<std::string, Event>> marks_;
};

}  // namespace spillway::cuda
