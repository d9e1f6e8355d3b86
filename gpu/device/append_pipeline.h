#pragma once

#include <cstddef>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "gpu/device/job_context.h"
#include "gpu/kernels/rows_append.h"

namespace spillway::cuda {

// The appends of a job: writes rows to their pages, updates the page tables, computes codes, and
// copies the rows that the GPU holds. All memory was prepared before.
class AppendPipeline {
 public:
  explicit AppendPipeline(JobContext* context) : context_(context) {}

  // Bytes of workspace through which rows from GPU memory pass.
  int64_t StageBytes() const;
  // Copies rows and enqueues the GPU's work. If `step_later`, the work for items that append few
  // tokens is left to TakeStep(), except the codes of pages that they close. stage: of
  // StageBytes().
  absl::Status Enqueue(bool step_later, std::byte* stage);
  // Returns the launch that was left, once. It becomes part of a wave's graph.
  StepAppend TakeStep() { return std::exchange(step_, {}); }
  // Updates the statuses of the items, once the GPU is done.
  void Collect() const;
  // Whether anything was enqueued for appends, apart from what is left to TakeStep().
  bool enqueued() const { return enqueued_; }

 private:
  const ModelSpec& spec() const { return context_->spec(); }

  // Tokens of an item's rows that are not indexed yet.
  int64_t NewTokens(size_t item) const;
  // Whether an item appends so few tokens that they are part of the step.
  bool AppendsFew(size_t item) const;
  // Whether an item's rows close pages that are not coded yet.
  bool ClosesPages(size_t item) const;
  absl::Status UpdateTables();
  EncodeWork Work(size_t item) const;
  // Encodes the pages that an item's rows close.
  absl::Status EncodePages(size_t item);
  // Indexes the new tokens of an item, and copies the rows that the GPU is to hold. list_free: no
  // launch reads the list of copies.
  absl::Status Index(size_t item, bool list_free);
  // Whether an item's rows, which come from GPU memory, can be read there. If not, sets its status.
  bool ComesFromGpu(size_t item) const;
  // Writes rows from GPU memory to their pages and to the GPU's own copies, and codes them on the
  // way.
  absl::Status AppendFromGpu(size_t item, std::byte* stage);
  // New rows of a KV head that one pair of the copy engine's copies moves.
  struct Run {
    int kv_head;
    int64_t token;
    int64_t count;
  };
  // Runs of all of an item's new rows, which come from GPU memory. Empty if a kernel moves them
  // faster.
  std::vector<Run> EngineRuns(size_t item) const;
  absl::Status CopyByEngine(size_t item, const std::vector<Run>& runs);
  // KV heads of a stage, and pages for each of them.
  int StageHeads() const;
  int64_t StagePages() const;
  // The table of the stages' pages, in GPU memory.
  const std::byte** StageTable() const;
  absl::Status FillStagePages(const std::byte* stage) const;
  // Codes the pages that the rows close, from their stage. stage_page: the stage's first page in
  // the table.
  absl::Status EncodeStage(size_t item, const RowsAppend& rows, int64_t stage_page,
                           cudaStream_t stream);
  // Fills the lists of what the step appends.
  void FillStep();

  JobContext* const context_;
  std::vector<TableUpdate> updates_;
  int64_t step_rows_ = 0;  // rows that the step appends, of all KV heads
  std::vector<RowCopy> step_copies_;
  StepAppend step_;
  bool enqueued_ = false;
};

}  // namespace spillway::cuda
