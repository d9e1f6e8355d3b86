#include "gpu/device/append_pipeline.h"

#include <algorithm>
#include <span>
#include <utility>

#include "host/base/status_macros.h"
#include "host/device/append_rows.h"

namespace spillway::cuda {
namespace {

// Up to here an append is part of a step.
constexpr int64_t kFewTokens = 16;

// Launches on a list in pinned memory, a piece at a time. The list is free at
// first if nothing on the stream reads it.
template <typename T, size_t kCount, typename LaunchList>
absl::Status InPieces(std::span<const T> all, std::array<T, kCount>& list, bool free,
                      cudaStream_t stream, LaunchList launch) {
  for (; !all.empty(); free = false) {
    if (!free) SPILLWAY_CUDA_RETURN_IF_ERROR(cudaStreamSynchronize(stream));
    const size_t count = std::min(all.size(), kCount);
    std::copy_n(all.begin(), count, list.begin());
    SPILLWAY_CUDA_RETURN_IF_ERROR(launch(list.data(), static_cast<int64_t>(count)));
    all = all.subspan(count);
  }
  return absl::OkStatus();
}

}  // namespace

int64_t AppendPipeline::NewTokens(size_t item) const {
  return context_->item(item).append->rows->token_count() -
         context_->index(item).indexed_token_count();
}

bool AppendPipeline::AppendsFew(size_t item) const {
  const CudaModel& model = context_->model();
  if (!model.has_rotation() || model.methods_encode()) return false;
  if (context_->index(item).indexed_token_count() == 0) return false;
  const int64_t count = NewTokens(item);
  return count <= kFewTokens &&
         step_rows_ + count * spec().kv_head_count <= AppendLists::kStepRowsMax;
}

bool AppendPipeline::ClosesPages(size_t item) const {
  return context_->model().has_rotation() &&
         ClosedPages(context_->item(item).append->rows->token_count()) >
             context_->index(item).coded_page_count();
}

absl::Status AppendPipeline::UpdateTables() {
  cudaStream_t stream = context_->stream();
  return InPieces(std::span<const TableUpdate>(std::exchange(updates_, {})),
                  context_->slot().lists().updates, /*free=*/true, stream,
                  [&](const TableUpdate* list, int64_t count) {
                    return LaunchTableUpdates(list, count, stream);
                  });
}

EncodeWork AppendPipeline::Work(size_t item) const {
  const LayerIndex& index = context_->index(item);
  return index.Work(index.indexed_token_count(), context_->item(item).append->rows->token_count());
}

absl::Status AppendPipeline::EncodePages(size_t item) {
  if (!ClosesPages(item)) return absl::OkStatus();
  const LayerIndex& index = context_->index(item);
  const RotationWeights weights = context_->model().rotation(context_->layer());
  EncodeWork work = Work(item);
  work.begin = index.coded_page_count() * kPageTokenCount;
  work.end = ClosedPages(work.end) * kPageTokenCount;
  if (work.begin == 0) {
    static_assert(FirstPagesScratchBytes(kHeadDimMax) <= StreamSlot::kAppendScratchBytes);
    SPILLWAY_CUDA_RETURN_IF_ERROR(
        LaunchEncodeFirstPages(work, weights, index.heads(), context_->slot().append_scratch(),
                               StreamSlot::kAppendScratchBytes, context_->stream()));
    work.begin = kCentreTokenCount;
  }
  SPILLWAY_CUDA_RETURN_IF_ERROR(
      LaunchEncodePages(work, weights, index.heads(), context_->stream()));
  return context_->Mark("encode");
}

absl::Status AppendPipeline::Index(size_t item, bool list_free) {
  const CudaModel& model = context_->model();
  LayerIndex& index = context_->index(item);
  const LayerRows& rows = *context_->item(item).append->rows;
  cudaStream_t stream = context_->stream();
  RETURN_IF_ERROR(EncodePages(item));
  if (model.methods_encode()) {
    const EncodeWork work = Work(item);
    if (work.begin == 0) {
      SPILLWAY_CUDA_RETURN_IF_ERROR(
          spec().hash.raw_keys
              ? cudaMemsetAsync(work.centre, 0, sizeof(float) * work.kv_head_count * work.head_dim,
                                stream)
              : LaunchCentre(work, kCentreTokenCount, stream));
    }
    SPILLWAY_CUDA_RETURN_IF_ERROR(model.methods()->Encode(work, context_->layer(), stream));
  }
  std::vector<RowCopy> copies;
  index.FillResident(rows, rows.token_count(), copies);
  index.SetIndexed(rows.token_count());
  RETURN_IF_ERROR(InPieces(std::span<const RowCopy>(copies), context_->slot().lists().copies,
                           list_free, stream, [&](const RowCopy* list, int64_t count) {
                             return LaunchRowCopies(list, count, spec().row_bytes(), stream);
                           }));
  return context_->Mark("append");
}

void AppendPipeline::FillStep() {
  AppendLists& lists = context_->slot().lists();
  std::copy(step_copies_.begin(), step_copies_.end(), lists.step_copies.begin());
  std::copy(updates_.begin(), updates_.end(), lists.updates.begin());
  lists.counts = {static_cast<int64_t>(updates_.size()), static_cast<int64_t>(step_copies_.size())};
  step_.row_bytes = spec().row_bytes();
  step_.row_count = static_cast<int>(step_rows_);
  step_.updates = lists.updates.data();
  step_.copies = lists.step_copies.data();
  step_.counts = &lists.counts;
}

absl::Status AppendPipeline::Enqueue(bool step_later) {
  std::vector<JobItem>& items = context_->job().items;
  for (JobItem& item : items) {
    if (!item.append.has_value()) continue;
    RETURN_IF_ERROR(AppendRows(spec(), context_->layer(), *item.append));
  }
  std::vector<size_t> few, longer;
  bool reads_tables = false;
  for (size_t i = 0; i < items.size(); ++i) {
    const JobItem& item = items[i];
    const LayerRows& rows = item.append.has_value() ? *item.append->rows : *item.attend->rows;
    LayerIndex& index = context_->index(i);
    RETURN_IF_ERROR(index.Update(rows, updates_));
    if (!item.append.has_value() || !spec().has_index()) continue;
    if (rows.token_count() < kCentreTokenCount) continue;
    if (!AppendsFew(i)) {
      longer.push_back(i);
      continue;
    }
    few.push_back(i);
    step_rows_ += NewTokens(i) * spec().kv_head_count;
    reads_tables |= ClosesPages(i);
    index.FillResident(rows, rows.token_count(), step_copies_);
  }
  // Encoders read the tables.
  reads_tables |= !longer.empty();
  if (step_rows_ == 0 || reads_tables || updates_.size() > AppendLists::kPieceMax) {
    RETURN_IF_ERROR(UpdateTables());
  }
  for (const size_t i : few) {
    RETURN_IF_ERROR(EncodePages(i));
    context_->index(i).SetIndexed(items[i].append->rows->token_count());
  }
  for (const size_t i : longer) {
    RETURN_IF_ERROR(Index(i, /*list_free=*/i == longer.front()));
  }
  if (step_rows_ == 0) return absl::OkStatus();
  FillStep();
  if (step_later) return absl::OkStatus();
  SPILLWAY_CUDA_RETURN_IF_ERROR(LaunchStepAppend(TakeStep(), context_->stream()));
  return context_->Mark("append");
}

}  // namespace spillway::cuda
