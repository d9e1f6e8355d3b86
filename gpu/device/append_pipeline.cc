#include "gpu/device/append_pipeline.h"

#include <algorithm>
#include <span>
#include <utility>

#include "host/base/status_macros.h"
#include "host/device/append_rows.h"

namespace spillway::cuda {
namespace {

// Up to here a block a key is quicker: a tile would be mostly empty.
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

bool AppendPipeline::AppendsFew(size_t item) const {
  const LayerIndex& layer = context_->index(item);
  const ModelMethods* const methods = context_->model().methods();
  const bool by_methods = methods != nullptr && methods->encodes();
  if (spec().hash.kind != HashKind::kRotation || by_methods || !layer.centred()) return false;
  const int64_t count =
      context_->item(item).append->rows->token_count() - layer.coded_token_count();
  const auto keys = static_cast<int64_t>(keys_.size());
  return count <= kFewTokens && keys + count * spec().kv_head_count <= AppendLists::kKeysMax;
}

absl::Status AppendPipeline::UpdateTables() {
  cudaStream_t stream = context_->stream();
  return InPieces(std::span<const TableUpdate>(std::exchange(updates_, {})),
                  context_->slot().lists().updates, /*free=*/true, stream,
                  [&](const TableUpdate* list, int64_t count) {
                    return LaunchTableUpdates(list, count, stream);
                  });
}

absl::Status AppendPipeline::Encode(size_t item, bool list_free) {
  const CudaModel& model = context_->model();
  LayerIndex& index = context_->index(item);
  const LayerRows& rows = *context_->item(item).append->rows;
  EncodeWork work;
  work.dtype = spec().dtype;
  work.head_dim = spec().head_dim;
  work.kv_head_count = spec().kv_head_count;
  work.row_bytes = spec().row_bytes();
  work.begin = index.centred() ? index.coded_token_count() : 0;
  work.end = rows.token_count();
  work.row_pages = index.row_pages(0);
  work.row_page_capacity = index.page_capacity();
  work.code_pages = index.code_pages(0);
  work.code_page_capacity = index.page_capacity();
  work.tiling = model.tiling();
  work.centre = index.centre();
  cudaStream_t stream = context_->stream();
  if (!index.centred()) {
    SPILLWAY_CUDA_RETURN_IF_ERROR(
        spec().hash.raw_keys
            ? cudaMemsetAsync(work.centre, 0, sizeof(float) * work.kv_head_count * work.head_dim,
                              stream)
            : LaunchCentre(work, kCentreTokenCount, stream));
  }
  if (spec().hash.kind == HashKind::kRotation) {
    SPILLWAY_CUDA_RETURN_IF_ERROR(
        LaunchEncodeRotation(work, model.rotation(context_->layer()), stream));
  }
  if (model.methods() != nullptr) {
    SPILLWAY_CUDA_RETURN_IF_ERROR(model.methods()->Encode(work, context_->layer(), stream));
  }
  std::vector<RowCopy> copies;
  index.FillResident(rows, rows.token_count(), copies);
  index.SetCoded(rows.token_count());
  RETURN_IF_ERROR(InPieces(std::span<const RowCopy>(copies), context_->slot().lists().copies,
                           list_free, stream, [&](const RowCopy* list, int64_t count) {
                             return LaunchRowCopies(list, count, spec().row_bytes(), stream);
                           }));
  return context_->Mark("append");
}

void AppendPipeline::FillStep() {
  AppendLists& lists = context_->slot().lists();
  std::copy(keys_.begin(), keys_.end(), lists.keys.begin());
  std::copy(key_copies_.begin(), key_copies_.end(), lists.key_copies.begin());
  std::copy(updates_.begin(), updates_.end(), lists.updates.begin());
  lists.counts = {static_cast<int64_t>(updates_.size()), static_cast<int64_t>(key_copies_.size())};
  step_.dtype = spec().dtype;
  step_.head_dim = spec().head_dim;
  step_.row_bytes = spec().row_bytes();
  step_.tiling = context_->model().tiling();
  step_.bits_per_dim = spec().hash.bits_per_dim;
  step_.keys = lists.keys.data();
  step_.key_count = static_cast<int>(keys_.size());
  step_.updates = lists.updates.data();
  step_.copies = lists.key_copies.data();
  step_.counts = &lists.counts;
}

absl::Status AppendPipeline::Enqueue(bool step_later) {
  std::vector<JobItem>& items = context_->job().items;
  for (JobItem& item : items) {
    if (item.append.has_value()) AppendRows(*item.append);
  }
  std::vector<size_t> longer;
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
    index.AddKeys(rows, context_->model().rotation(context_->layer()).transposed, keys_);
    index.FillResident(rows, rows.token_count(), key_copies_);
    index.SetCoded(rows.token_count());
  }
  // The encoder of many keys reads the tables.
  if (keys_.empty() || !longer.empty() || updates_.size() > AppendLists::kPieceMax) {
    RETURN_IF_ERROR(UpdateTables());
  }
  for (const size_t i : longer) {
    RETURN_IF_ERROR(Encode(i, /*list_free=*/i == longer.front()));
  }
  if (keys_.empty()) return absl::OkStatus();
  FillStep();
  if (step_later) return absl::OkStatus();
  SPILLWAY_CUDA_RETURN_IF_ERROR(LaunchStepAppend(TakeStep(), context_->stream()));
  return context_->Mark("append");
}

}  // namespace spillway::cuda
