#pragma once

#include <cstddef>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "gpu/device/job_context.h"
#include "gpu/kernels/rows_append.h"

namespace spillway::cuda {

// A job's appends: rows to their pages, tables, codes, and the rows that the
// GPU holds. Room was prepared, so that nothing needs to be reserved.
class AppendPipeline {
 public:
  explicit AppendPipeline(JobContext* context) : context_(context) {}

  // Bytes of the workspace that rows from GPU memory pass through.
  int64_t StageBytes() const;
  // Copies rows and puts on the stream what the GPU does with them. What items
  // that append few tokens need but the codes of pages that they close is left
  // to TakeStep() if `step_later`. stage: of StageBytes().
  absl::Status Enqueue(bool step_later, std::byte* stage);
  // What is left to be launched, once: it becomes part of a wave's graph.
  StepAppend TakeStep() { return std::exchange(step_, {}); }
  // Statuses of the items, once the GPU is done.
  void Collect() const;
  // Whether more than what is left to be launched was enqueued for appends.
  bool enqueued() const { return enqueued_; }

 private:
  const ModelSpec& spec() const { return context_->spec(); }

  // Tokens of an item's rows that are not indexed yet.
  int64_t NewTokens(size_t item) const;
  // Whether an item appends few tokens, as a part of the step.
  bool AppendsFew(size_t item) const;
  // Whether an item's rows close pages that are not coded yet.
  bool ClosesPages(size_t item) const;
  absl::Status UpdateTables();
  EncodeWork Work(size_t item) const;
  // Encodes the pages that an item's rows close.
  absl::Status EncodePages(size_t item);
  // Indexes what was appended to an item's rows, and brings over those that the
  // GPU is to hold. list_free: no other item's copies are on their way.
  absl::Status Index(size_t item, bool list_free);
  // Whether an item's rows come from GPU memory and can be read there; else its
  // status says why not.
  bool ComesFromGpu(size_t item) const;
  // Writes rows from GPU memory to their pages, the GPU's own among them, and codes
  // them on the way.
  absl::Status AppendFromGpu(size_t item, std::byte* stage);
  // A table of the stages' pages, on the GPU.
  const std::byte** StagePages() const;
  absl::Status FillStagePages(const std::byte* stage) const;
  // Codes the pages that are closed by the rows' end, from their stage.
  // stage_page: the stage's first in the table.
  absl::Status EncodeStage(size_t item, const RowsAppend& rows, int64_t stage_page,
                           cudaStream_t stream);
  // What is appended by the step, its lists filled.
  void FillStep();

  JobContext* const context_;
  std::vector<TableUpdate> updates_;
  int64_t step_rows_ = 0;  // that the step appends, of all KV heads
  std::vector<RowCopy> step_copies_;
  StepAppend step_;
  bool enqueued_ = false;
};

}  // namespace spillway::cuda
