#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "gpu/cuda/stream.h"
#include "gpu/device/sequence.h"
#include "gpu/device/stage_times.h"
#include "gpu/device/stream_slot.h"
#include "gpu/kernels/step.h"

namespace spillway::cuda {

// Properties of the GPU on which launches depend.
struct Gpu {
  int sm_count = 0;
  int block_shared_bytes = 0;  // shared memory of a block, at most
  // Compute capability 9.0 or later: bulk copies, and kernels that overlap the one before.
  bool hopper = false;
  int ordinal = 0;
  std::string_view name = {};      // of the device, "cuda:0"; must outlive jobs
  double memory_bytes_per_us = 0;  // of its memory, as clock and width say; 0: not known
};

inline int64_t RoundUp(int64_t x, int64_t step) { return (x + step - 1) / step * step; }

// Parts of a step's units that may run at once, each on a stream of its own.
inline constexpr int kStepLanesMax = 4;
// A stream for work of a step beside that on the step's own stream. It begins after `begins` on
// another stream, and the step's stream continues after `ends` on this one.
struct StepLane {
  Stream stream;
  Event begins, ends;
};

// For a job that is a layer of a step on a caller's stream. Its requests are uploaded before, its
// tensors are in GPU memory, and its launches may run again for later announcements.
struct StepContext {
  // Most tokens of a sequence. Memory is allocated for as many.
  int64_t token_count_max = 0;
  // Most bytes of the workspace of the units that run at a time, unless one unit takes more.
  int64_t workspace_bytes = 0;
  // Offset from requests in pinned memory to their uploaded copies, bytes.
  std::ptrdiff_t upload_offset = 0;
  // Plans for rows that cross the link, wherever they are: that takes the most memory.
  bool measures = false;
  uint32_t number = 0;  // of the announcement
  bool ran = false;     // whether any unit has reported this number
  // For the next launch:
  cudaStream_t stream = nullptr;
  CallerTensors tensors;
  // For what runs beside the first lane's waves.
  std::span<const StepLane> lanes;
};

// A job on a stream slot, or a layer of a step: what its pipelines share. Used by one thread at a
// time.
class JobContext {
 public:
  JobContext(Job* job, StreamSlot* slot, const Gpu& gpu) : job_(job), slot_(slot), gpu_(gpu) {}
  JobContext(Job* job, StepContext* step, const Gpu& gpu) : job_(job), step_(step), gpu_(gpu) {}

  Job& job() const { return *job_; }
  // REQUIRES: not a step.
  StreamSlot& slot() const { return *slot_; }
  // Null for a job on a slot.
  StepContext* step() const { return step_; }
  cudaStream_t stream() const { return step_ != nullptr ? step_->stream : slot_->stream(); }
  // Most bytes of workspace of the units that run at a time, unless one unit takes more.
  int64_t workspace_bytes() const {
    return step_ != nullptr ? step_->workspace_bytes : slot_->wave_bytes();
  }
  // Null for a step, which is not cancelled.
  const int32_t* cancel() const { return step_ != nullptr ? nullptr : slot_->cancel(); }
  // Tokens for which a unit of n tokens has memory.
  int64_t TokenCapacity(int64_t n) const { return step_ != nullptr ? step_->token_count_max : n; }
  // Where kernels read data that was written to pinned memory.
  template <typename T>
  T* Uploaded(T* pinned) const {
    if (step_ == nullptr || pinned == nullptr) return pinned;
    return reinterpret_cast<T*>(reinterpret_cast<std::byte*>(pinned) + step_->upload_offset);
  }
  const Gpu& gpu() const { return gpu_; }
  const CudaModel& model() const { return static_cast<const CudaModel&>(*job_->model); }
  const ModelSpec& spec() const { return model().spec(); }
  int layer() const { return job_->layer; }

  // (query, group) pairs of all items, at least 1.
  int64_t unit_count() const;

  JobItem& item(size_t item) const { return job_->items[item]; }
  // REQUIRES: the item attends.
  const AttendQuery& attend(size_t item) const { return *job_->items[item].attend; }
  LayerIndex& index(size_t item) const;
  // Converts the query heads of a group to fp32: q [G][d].
  void ToFloats(size_t item, int64_t query, int group_index, float* q) const;

  // Whether the job's attends are cancelled or late. If so, tells the kernels.
  bool Cancelled() const;
  // Makes a stage of the work enqueued since the last mark, if the job is traced.
  absl::Status Mark(std::string_view stage);
  // Times of stages, except those between marks.
  StageTimes& stages() { return stages_; }
  // Forgets marks and times, for the next announcement of the layer.
  void ClearTimes() {
    marks_.clear();
    stages_ = {};
  }
  // Adds the time between two events of the stream to a stage, once the GPU is done.
  void AddStage(JobStage stage, cudaEvent_t from, cudaEvent_t to);
  // Fills in the job's times, once the GPU is done and all stages were added.
  void CollectTimes();
  // The status that a unit reports for this announcement; OK for a job on a slot. query,
  // group_index: the unit's first.
  absl::Status CheckReport(const StepReport& report, size_t item, int64_t query,
                           int group_index) const;

 private:
  Job* const job_;
  StreamSlot* const slot_ = nullptr;
  StepContext* const step_ = nullptr;
  const Gpu gpu_;
  std::vector<std::pair<std::string, Event>> marks_;
  StageTimes stages_;
};

}  // namespace spillway::cuda
