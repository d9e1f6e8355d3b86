#pragma once

#include <array>
#include <optional>
#include <vector>

#include "absl/status/status.h"
#include "gpu/device/carver.h"
#include "gpu/device/job_context.h"
#include "gpu/kernels/attend.h"

namespace spillway::cuda {

// A job's queries that choose their rows: one after the other planned by Add(),
// measured by Reserve(), prepared, launched and, once the GPU is done, collected.
class SparsePipeline {
 public:
  explicit SparsePipeline(JobContext* context) : context_(context) {}

  // A query of an item whose policy CheckServed() takes.
  void Add(size_t item, int64_t query);
  bool empty() const { return waves_.empty(); }
  // Takes the pinned memory of all from carvers that only measure: what the GPU
  // reads, and what it writes. Returns the bytes of the workspace, which the waves of
  // a lane have one after the other.
  int64_t Reserve(Carver& requests, Carver& results);
  // Lays everything out and writes the requests.
  void Prepare(Carver& requests, Carver& results, std::byte* workspace);
  // append: what is appended before the first wave, as a part of its graph.
  absl::Status Launch(StepAppend append);
  // The waves as they are launched: what can be captured depends on them alone.
  std::vector<Wave> Views() const;
  // Results and statuses of the items, and the stages' times.
  void Collect() const;

 private:
  // One KV head of a query of an item.
  struct Unit {
    size_t item;
    int64_t query;
    int kv_head;
  };
  // Units that go through the kernels together.
  struct UnitWave {
    std::vector<Unit> units;
    AttendShape shape;
    std::optional<AttendShape> first;
    const TailKernels* tail_kernels = nullptr;
    bool select_only = false;
    int lane = 0;
    // Of the workspace: what all units have of their own, and what the wave
    // takes at most.
    int64_t unit_bytes = 0;
    int64_t bytes_max = 0;
    int64_t bytes = 0;  // once measured
    // Pinned.
    UnitRequest* requests = nullptr;
    float* q = nullptr;
    UnitResult* results = nullptr;
    float* out = nullptr;
    // In the workspace.
    UnitRequest* device_requests = nullptr;
    float* device_q = nullptr;
    WaveMethods methods;
  };

  const ModelSpec& spec() const { return context_->spec(); }
  // The policy of a wave's units, the same in all that their kernels depend on.
  const Policy& PolicyOf(const UnitWave& wave) const {
    return context_->attend(wave.units.front().item).policy;
  }

  // Waves of different lanes run at once. A step of many units has two, so that the rows
  // of one half cross the link while the other half is scored; jobs run beside other jobs.
  static constexpr int kLanesMax = 2;
  int lane_count() const;
  // The bytes of the workspace that each lane has.
  std::array<int64_t, kLanesMax> LaneBytes() const;

  // A wave for queries of an item, without units.
  UnitWave WaveFor(size_t item) const;
  AttendShape ShapeOf(const Policy& policy, Selector selector) const;

  // Memory; empty carvers only measure. What a wave of unit_count units has
  // beside the units' own:
  void LayOutWave(const Policy& policy, int64_t unit_count, UnitWave& wave, Carver& requests,
                  Carver& results, Carver& workspace) const;
  // What unit i has of its own; the request's n, begin and end are known.
  void LayOutUnit(const UnitWave& wave, int64_t i, const Unit& unit, UnitRequest& request,
                  Carver& workspace) const;

  // What is asked of a query's units, but for tails and addresses.
  UnitRequest Request(size_t item, int64_t query) const;
  // Where a unit's rows and codes lie, and in which order they are sampled.
  void Address(const Unit& unit, UnitRequest& request) const;
  // Writes the requests and queries of a wave that is laid out.
  void Fill(const UnitWave& wave, Carver& workspace) const;

  // The kernels' view of a wave that is filled.
  Wave View(const UnitWave& wave, const StepAppend& append) const;
  absl::Status Launch(const UnitWave& wave, const StepAppend& append);
  // Reads the lists of a wave that only selects. Waits for the GPU.
  absl::Status CollectSelections(const UnitWave& wave) const;
  void Collect(const UnitWave& wave) const;

  JobContext* const context_;
  std::vector<UnitWave> waves_;
  const uint64_t* append_begins_ = nullptr;  // of the append in the first wave's graph
};

}  // namespace spillway::cuda
