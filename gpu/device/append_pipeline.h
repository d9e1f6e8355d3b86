#pragma once

#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "gpu/device/job_context.h"

namespace spillway::cuda {

// A job's appends: rows to their pages, tables, codes, and the rows that the
// GPU holds. Room was prepared, so that nothing needs to be reserved.
class AppendPipeline {
 public:
  explicit AppendPipeline(JobContext* context) : context_(context) {}

  // Copies rows and puts on the stream what the GPU does with them. Keys of
  // items that append few are left to TakeStep() if `step_later`.
  absl::Status Enqueue(bool step_later);
  // What is left to be launched, once: it becomes part of a wave's graph.
  StepAppend TakeStep() { return std::exchange(step_, {}); }

 private:
  const ModelSpec& spec() const { return context_->spec(); }

  // Whether an item appends few keys, which a step's append encodes.
  bool AppendsFew(size_t item) const;
  absl::Status UpdateTables();
  // Encodes what was appended to an item's rows, and brings over those that
  // the GPU is to hold. list_free: no other item's copies are on their way.
  absl::Status Encode(size_t item, bool list_free);
  // What is appended by the step, its lists filled.
  void FillStep();

  JobContext* const context_;
  std::vector<TableUpdate> updates_;
  std::vector<AppendedKey> keys_;
  std::vector<RowCopy> key_copies_;
  StepAppend step_;
};

}  // namespace spillway::cuda
