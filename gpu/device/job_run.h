#pragma once

#include <memory>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "gpu/device/sequence.h"
#include "gpu/device/stream_slot.h"

namespace spillway::cuda {

// What launches depend on.
struct Gpu {
  int sm_count = 0;
  // Compute capability 9.0: bulk copies, and kernels that begin early.
  bool hopper = false;
  std::string_view name = {};  // of the device, "cuda:0"; outlives jobs
};

// Pages per KV head that a dense run of many queries brings over at a time, and
// rows of its splits.
inline constexpr int64_t kStagePages = 64;
inline constexpr int64_t kStagedSplitRows = 2048;

inline int64_t RoundUp(int64_t x, int64_t step) { return (x + step - 1) / step * step; }

// One job on its way through a stream slot: rows copied and work enqueued, then, once
// the slot's stream is done, results collected.
class JobRun {
 public:
  JobRun(Job* job, StreamSlot* slot, const Gpu& gpu);

  // Everything that the GPU is to do. The caller waits for the slot's stream
  // before it ends the run, also after an error, which is of the whole job.
  absl::Status Enqueue();
  // Whether nobody waits for the job's attends any more. Tells the kernels.
  bool Cancelled();
  // Results and statuses of the items, once the GPU is done.
  void Collect();

 private:
  // One KV head of a sparse query of an item.
  struct SparseUnit {
    size_t item;
    int64_t query;
    int kv_head;
  };
  // Units that go through the kernels together.
  struct SparseWave {
    std::vector<SparseUnit> units;
    bool select_only = false;
    int64_t workspace_bytes = 0;
    // Pinned.
    UnitRequest* requests = nullptr;
    UnitResult* results = nullptr;
    float* q = nullptr;
    float* out = nullptr;
    WaveMethods methods;
  };
  // Dense queries [begin, end) of an item, up to kDenseQueryRows query rows
  // of each KV head at a time.
  struct DenseRun {
    size_t item;
    int64_t begin;
    int64_t end;
  };
  struct DenseBlock {
    size_t item;
    int64_t begin;
    int64_t end;
    int kv_head;
    DenseUnit unit;
  };
  struct DensePart {
    std::vector<DenseBlock> blocks;
    bool staged = false;
    int64_t partial_bytes = 0;
    // Pinned.
    DenseUnit* units = nullptr;
    float* q = nullptr;
    float* out = nullptr;
    float* lse = nullptr;
    uint32_t* errors = nullptr;
  };

  const CudaModel& model() const { return static_cast<const CudaModel&>(*job_->model); }
  const ModelSpec& spec() const { return model().spec(); }
  LayerIndex& index(size_t item) const;
  const AttendQuery& attend(size_t item) const { return *job_->items[item].attend; }

  // UNIMPLEMENTED for a policy that this build has no kernels for.
  absl::Status CheckServed(const Policy& policy) const;
  void Split();
  // Memory for all attends. RESOURCE_EXHAUSTED, and then nothing has changed.
  absl::Status Reserve();
  absl::Status EnqueueAppends();
  // Whether an item appends few keys, which a step's append encodes.
  bool AppendsFew(size_t item) const;
  absl::Status UpdateTables();
  // Encodes what was appended to an item's rows, and brings over those that
  // the GPU is to hold. list_free: no other item's copies are on their way.
  absl::Status Encode(size_t item, bool list_free);
  // What is appended by the step, its lists filled; to be launched.
  void FillStepAppend();
  absl::Status EnqueueAttends();
  void AddDense(const DenseRun& run);
  void AddSparse(size_t item, int64_t query);
  // Lays a wave's or part's memory out; with empty carvers only measures.
  void LayOut(SparseWave& wave, Carver& pinned, Carver& workspace, bool fill);
  void LayOut(DensePart& part, Carver& pinned, Carver& workspace, bool fill);
  // What is asked of a query's units, and where things of a unit's own lie.
  UnitRequest Request(size_t item, int64_t query) const;
  void Address(const SparseUnit& unit, UnitRequest& request) const;
  void ToFloats(size_t item, int64_t query, int kv_head, float* q) const;
  AttendShape Shape(const SparseWave& wave) const;
  // Of its first selection, if it has one.
  std::optional<AttendShape> FirstShape(const SparseWave& wave) const;
  void SetSelector(Selector selector, AttendShape& shape) const;
  // The kernels' view of a wave that is laid out.
  Wave View(const SparseWave& wave) const;
  absl::Status Launch(SparseWave& wave);
  absl::Status LaunchKernels(const Wave& wave);
  absl::Status Launch(DensePart& part);
  absl::Status CollectSelections(const SparseWave& wave);
  void Collect(const SparseWave& wave);
  void Collect(const DensePart& part);
  // What was enqueued since the mark before is a stage, if the job asks.
  absl::Status Mark(std::string_view stage);

  Job* const job_;
  StreamSlot* const slot_;
  const Gpu gpu_;
  std::vector<TableUpdate> updates_;
  std::vector<AppendedKey> keys_;
  std::vector<RowCopy> key_copies_;
  StepAppend step_append_;
  std::vector<SparseWave> waves_;
  std::vector<DensePart> dense_;
  std::byte* pinned_ = nullptr;
  std::byte* workspace_ = nullptr;
  // In the workspace, of the wave or part laid out last.
  UnitRequest* device_requests_ = nullptr;
  const DenseUnit* device_units_ = nullptr;
  std::byte* stage_ = nullptr;
  const std::byte** stage_table_ = nullptr;  // device
  const std::byte** stage_table_pinned_ = nullptr;
  int64_t request_bytes_ = 0;
  std::vector<std::pair<std::string, Event>> marks_;
};

}  // namespace spillway::cuda
