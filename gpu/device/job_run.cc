#include "gpu/device/job_run.h"

#include <algorithm>
#include <vector>

#include "gpu/device/sequence.h"
#include "gpu/device/wave_kernels.h"
#include "host/base/status_macros.h"
#include "host/device/results.h"

namespace spillway::cuda {

void JobRun::Plan() {
  for (size_t i = 0; i < context_.job().items.size(); ++i) {
    JobItem& item = context_.item(i);
    if (!item.attend.has_value() || !item.status.ok()) continue;
    item.status = CheckServed(item.attend->policy, context_.gpu().name);
    if (item.status.ok() && !item.append.has_value()) {
      // The first attend of a fork has no tables yet. Without memory for them, only this item
      // fails.
      item.status = static_cast<CudaSequence&>(*item.sequence)
                        .Reserve(context_.layer(), item.attend->rows->token_count());
    }
    if (!item.status.ok()) continue;
    item.result = AllocateResult(context_.spec(), *item.attend);
    CutQueries(
        context_.spec(), *item.attend, context_.layer(),
        [&](int64_t begin, int64_t end) { dense_.Add(i, begin, end); },
        [&](int64_t query) { sparse_.Add(i, query); });
  }
}

absl::Status JobRun::Reserve() {
  // Pinned memory for all, but only the largest workspace, because waves and parts run one after
  // the other.
  Carver pinned;
  const int64_t sparse_bytes = sparse_.Reserve(pinned, pinned);
  const int64_t dense_bytes = dense_.Reserve(pinned, pinned);
  const int64_t stage_bytes = append_.StageBytes();
  if (pinned.bytes() == 0 && stage_bytes == 0) return absl::OkStatus();
  StreamSlot& slot = context_.slot();
  ASSIGN_OR_RETURN(pinned_, slot.Pinned(pinned.bytes()));
  ASSIGN_OR_RETURN(workspace_, slot.Workspace(std::max({sparse_bytes, dense_bytes, stage_bytes})));
  return absl::OkStatus();
}

absl::Status JobRun::EnqueuePipelines() {
  // Sparse attends include a step's append in their graph.
  RETURN_IF_ERROR(append_.Enqueue(/*step_later=*/!sparse_.empty(), workspace_));
  StreamSlot& slot = context_.slot();
  if (append_.enqueued() && attends()) {
    SPILLWAY_CUDA_RETURN_IF_ERROR(cudaEventRecord(slot.appended(), slot.stream()));
  }
  Carver pinned(pinned_);
  sparse_.Prepare(pinned, pinned, workspace_);
  dense_.Prepare(pinned, pinned, workspace_);
  RETURN_IF_ERROR(sparse_.Launch(append_.TakeStep()));
  if (!sparse_.empty() && !dense_.empty()) {
    SPILLWAY_CUDA_RETURN_IF_ERROR(cudaEventRecord(slot.dense(), slot.stream()));
  }
  return dense_.Launch(slot.stream());
}

absl::Status JobRun::Enqueue() {
  Plan();
  RETURN_IF_ERROR(Reserve());
  reserved_ = true;
  StreamSlot& slot = context_.slot();
  SPILLWAY_CUDA_RETURN_IF_ERROR(cudaEventRecord(slot.start(), slot.stream()));
  std::vector<int64_t> indexed;
  for (size_t i = 0; i < context_.job().items.size(); ++i) {
    indexed.push_back(context_.index(i).indexed_token_count());
  }
  if (absl::Status status = EnqueuePipelines(); !status.ok()) {
    for (size_t i = 0; i < indexed.size(); ++i) {
      LayerIndex& index = context_.index(i);
      index.ForgetTables();
      // Encoders and copies that are counted may not have run.
      index.SetIndexed(indexed[i]);
      index.whole().SetFilled(0);
    }
    return status;
  }
  return ToStatus(cudaEventRecord(slot.done(), slot.stream()), "cudaEventRecord");
}

void JobRun::CollectStages() {
  const StreamSlot& slot = context_.slot();
  if (append_.enqueued()) {
    context_.AddStage(JobStage::kAppend, slot.start(), attends() ? slot.appended() : slot.done());
  }
  if (dense_.empty()) return;
  context_.AddStage(JobStage::kDense,
                    !sparse_.empty()     ? slot.dense()
                    : append_.enqueued() ? slot.appended()
                                         : slot.start(),
                    slot.done());
}

void JobRun::Collect() {
  append_.Collect();
  sparse_.Collect();
  dense_.Collect();
  for (JobItem& item : context_.job().items) {
    if (item.attend.has_value() && item.status.ok()) {
      item.status = CheckOutput(context_.spec(), context_.layer(), item.result);
    }
  }
  CollectStages();
  context_.CollectTimes();
}

}  // namespace spillway::cuda
