#pragma once

#include <array>
#include <optional>
#include <vector>

#include "absl/status/status.h"
#include "gpu/device/carver.h"
#include "gpu/device/job_context.h"
#include "gpu/kernels/attend.h"

namespace spillway::cuda {

// The queries of a job that choose their rows. Add() plans them and Reserve() measures them. Then
// come Prepare(), Launch() and, once the GPU is done, Collect().
class SparsePipeline {
 public:
  explicit SparsePipeline(JobContext* context) : context_(context) {}

  // Forgets all queries, for the next announcement of the layer.
  void Clear();
  // Adds a query of an item, whose policy CheckServed() accepts.
  void Add(size_t item, int64_t query);
  bool empty() const { return waves_.empty(); }
  // Takes the pinned memory of all waves from carvers that only measure: requests, which the GPU
  // reads, and results, which it writes. Returns the bytes of the workspace, which the waves of a
  // lane use one after the other.
  int64_t Reserve(Carver& requests, Carver& results);
  // For a step: the most bytes of workspace that its waves take when some of its items are attended
  // densely, so that the waves around them become one.
  int64_t WorkspaceMax() const;
  // Lays out all waves and writes the requests.
  void Prepare(Carver& requests, Carver& results, std::byte* workspace);
  // append: the append before the first wave, as a part of its graph.
  absl::Status Launch(StepAppend append);
  // The waves as they are launched. A captured graph depends on nothing else.
  std::vector<Wave> Views() const;
  // Sets the results and statuses of the items, and the stages' times.
  void Collect() const;

 private:
  // One group of a query of an item.
  struct Unit {
    size_t item;
    int64_t query;
    int group_index;
  };
  // Units that the kernels process together.
  struct UnitWave {
    std::vector<Unit> units;
    AttendShape shape;
    std::optional<AttendShape> first;
    const TailKernels* tail_kernels = nullptr;
    bool select_only = false;
    int lane = 0;
    // In the workspace: bytes of the units' own memory, and most bytes of the wave.
    int64_t unit_bytes = 0;
    int64_t bytes_max = 0;
    int64_t bytes = 0;  // as measured by Reserve()
    // In pinned memory.
    UnitRequest* requests = nullptr;
    float* q = nullptr;
    UnitResult* results = nullptr;
    float* out = nullptr;
    // In the workspace.
    UnitRequest* device_requests = nullptr;
    float* device_q = nullptr;
    SharedRows shared{};
    WaveMethods methods;
  };

  const ModelSpec& spec() const { return context_->spec(); }
  // The policy of a wave's units. All that their kernels depend on is the same.
  const Policy& PolicyOf(const UnitWave& wave) const {
    return context_->attend(wave.units.front().item).policy;
  }

  int KvHeadOf(const Unit& unit) const { return spec().KvHeadOf(unit.group_index); }
  // Waves of different lanes run concurrently; see docs/adr/0081. Jobs run beside other jobs
  // instead, and have one. Decides how many there are, before the first query is added.
  void ChooseLanes();
  // Whether any rows of the items may be in host memory alone.
  bool MayCrossLink() const;
  // Whether units may read the same rows: because two are of one KV head of one item, or because
  // two sequences have their first page in common.
  bool MayShareRows() const;
  bool uses_lanes() const { return waves_.size() > 1 && lanes_ > 1; }
  // Bytes of workspace for each lane.
  std::array<int64_t, kStepLanesMax> LaneBytes() const;

  // A wave without units that fits the queries of an item.
  UnitWave WaveFor(size_t item) const;
  AttendShape ShapeOf(const Policy& policy, Selector selector) const;

  // Memory layout; empty carvers only measure. LayOutWave() takes what a wave of unit_count units
  // has beside the units' own memory.
  void LayOutWave(const Policy& policy, int64_t unit_count, UnitWave& wave, Carver& requests,
                  Carver& results, Carver& workspace) const;
  // Slots of a wave's table of shared rows; 0 if it has none.
  uint32_t SharedSlots(int64_t unit_count) const;
  // Rows that a unit of n tokens gathers in GPU memory. taken: bytes of its other own memory.
  int64_t StagingRows(const AttendShape& shape, int64_t n, int64_t taken) const;
  // Takes what a coded unit of up to n tokens has besides.
  static void LayOutCodes(const AttendShape& shape, int64_t n, UnitRequest& request,
                          Carver& workspace);
  // Takes the own memory of unit i. n, begin and end of the request are set.
  void LayOutUnit(const UnitWave& wave, int64_t i, const Unit& unit, UnitRequest& request,
                  Carver& workspace) const;

  // The request for a query's units, without tails and addresses.
  UnitRequest Request(size_t item, int64_t query) const;
  // Sets where a unit's rows and codes are, and in which order they are sampled.
  void Address(const Unit& unit, UnitRequest& request) const;
  // Lays out a wave's units, and writes their requests and queries.
  void Fill(const UnitWave& wave, Carver& workspace) const;

  // The kernels' view of a wave that is filled.
  Wave View(const UnitWave& wave, const StepAppend& append) const;
  // scored: see LaunchWave().
  absl::Status Launch(const UnitWave& wave, const StepAppend& append, cudaEvent_t scored);
  absl::Status LaunchLanes();
  // Reads the lists of rows of a wave that only selects. Waits for the GPU.
  absl::Status CollectSelections(const UnitWave& wave) const;
  void Collect(const UnitWave& wave) const;

  JobContext* const context_;
  std::vector<UnitWave> waves_;
  // From the first Add() on:
  int64_t unit_count_ = 0;    // of the context
  bool crosses_link_ = true;  // MayCrossLink()
  bool shares_rows_ = false;  // whether it does, and MayShareRows()
  int lanes_max_ = 1;         // lanes for which the step has memory
  int lanes_ = 1;
  int64_t unit_bytes_max_ = 0;               // of a unit alone in a wave
  const uint64_t* append_begins_ = nullptr;  // when the first wave's append begins
};

}  // namespace spillway::cuda
