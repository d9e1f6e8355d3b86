#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "absl/status/status.h"
#include "gpu/cuda/buffer.h"
#include "gpu/cuda/graph.h"
#include "gpu/cuda/stream.h"
#include "gpu/device/carver.h"
#include "gpu/kernels/attend.h"
#include "host/base/status_macros.h"

namespace spillway::cuda {

// Graphs of waves that occur again and again, as in decoding. The launches of a wave depend only on
// its Wave, because values that change from step to step are in memory.
class GraphCache {
 public:
  // Puts the work of `enqueue` on the stream: directly if the wave is new, later as a graph.
  template <typename Enqueue>
  absl::Status Run(const Wave& wave, cudaStream_t stream, Enqueue enqueue) {
    Entry* entry = Find(wave);
    if (entry == nullptr) return enqueue();
    if (!entry->graph) {
      ASSIGN_OR_RETURN(entry->graph, Graph::Capture(stream, enqueue));
    }
    return entry->graph.Launch(stream);
  }

 private:
  struct Entry {
    Wave wave;
    Graph graph;
  };
  // The wave's entry. If there is none, adds one and returns null.
  Entry* Find(const Wave& wave);

  std::vector<Entry> entries_;  // most recently used first
};

// Pinned memory for the lists of appends. It always exists, so that a prepared append cannot fail
// for lack of it.
struct AppendLists {
  static constexpr int kStepRowsMax = 1024;
  static constexpr int kPieceMax = 4096;

  AppendCounts counts;
  uint64_t step_begins;  // see StepAppend
  // The first bad element of an append from GPU memory, see RowsAppend.
  unsigned long long bad_row;
  std::array<RowCopy, kCopiesOfRow * kStepRowsMax> step_copies;
  // For the rows and pages of longer appends, a piece at a time.
  std::array<RowCopy, kPieceMax> copies;
  std::array<TableUpdate, kPieceMax> updates;
};

// What one running job uses: a stream, and memory that grows with the jobs. Not thread-safe. May
// grow only while nothing runs on the stream.
class StreamSlot {
 public:
  // wave_bytes: most workspace of a wave, unless one unit takes more. urgent: the GPU schedules its
  // kernels before those of other slots.
  static absl::StatusOr<std::unique_ptr<StreamSlot>> Create(MemoryBudget* device_budget,
                                                            MemoryBudget* host_budget,
                                                            int64_t wave_bytes, bool urgent);

  // At least `bytes` bytes. RESOURCE_EXHAUSTED.
  absl::StatusOr<std::byte*> Workspace(int64_t bytes);
  absl::StatusOr<std::byte*> Pinned(int64_t bytes);

  // Device memory and lists for appends, which always exist.
  static constexpr int64_t kAppendScratchBytes = int64_t{256} << 10;
  std::byte* append_scratch() const { return append_scratch_.data(); }
  // Directly behind append_scratch().
  unsigned long long* bad_row() const {
    return reinterpret_cast<unsigned long long*>(append_scratch_.data() + kAppendScratchBytes);
  }
  // Rows from GPU memory are coded on side_stream(), from stages that are filled and coded in turn.
  static constexpr int kStages = 2;
  struct Stage {
    Event filled, coded;
  };
  cudaStream_t side_stream() const { return side_stream_.get(); }
  std::array<Stage, kStages>& stages() { return stages_; }
  AppendLists& lists() { return *reinterpret_cast<AppendLists*>(lists_.data()); }
  int64_t wave_bytes() const { return wave_bytes_; }
  GraphCache& graphs() { return graphs_; }
  cudaStream_t stream() const { return stream_.get(); }
  cudaEvent_t start() const { return start_.get(); }
  cudaEvent_t done() const { return done_.get(); }
  // Between the parts of a job: after its appends, and before its dense attends.
  cudaEvent_t appended() const { return appended_.get(); }
  cudaEvent_t dense() const { return dense_.get(); }
  // Pinned; not 0 asks the kernels to stop.
  int32_t* cancel() const { return reinterpret_cast<int32_t*>(cancel_.data()); }

 private:
  MemoryBudget* device_budget_ = nullptr;
  MemoryBudget* host_budget_ = nullptr;
  int64_t wave_bytes_ = 0;
  Stream stream_;
  Stream side_stream_;
  std::array<Stage, kStages> stages_;
  Event start_, done_, appended_, dense_;
  DeviceBuffer workspace_;
  DeviceBuffer append_scratch_;
  PinnedBuffer pinned_;
  PinnedBuffer cancel_;
  PinnedBuffer lists_;
  GraphCache graphs_;
};

}  // namespace spillway::cuda
