// What a job's appends put on its slot's stream.
#include <algorithm>
#include <span>
#include <utility>

#include "gpu/device/job_run.h"
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

bool JobRun::AppendsFew(size_t item) const {
  const LayerIndex& layer = index(item);
  const bool by_methods = model().methods() != nullptr && model().methods()->encodes();
  if (spec().hash.kind != HashKind::kRotation || by_methods || !layer.centred()) return false;
  const int64_t count = job_->items[item].append->rows->token_count() - layer.coded_token_count();
  const auto keys = static_cast<int64_t>(keys_.size());
  return count <= kFewTokens && keys + count * spec().kv_head_count <= AppendLists::kKeysMax;
}

absl::Status JobRun::UpdateTables() {
  return InPieces(std::span<const TableUpdate>(std::exchange(updates_, {})), slot_->lists().updates,
                  /*free=*/true, slot_->stream(), [&](const TableUpdate* list, int64_t count) {
                    return LaunchTableUpdates(list, count, slot_->stream());
                  });
}

absl::Status JobRun::Encode(size_t item, bool list_free) {
  LayerIndex& index = this->index(item);
  const LayerRows& rows = *job_->items[item].append->rows;
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
  work.tiling = model().tiling();
  work.centre = index.centre();
  cudaStream_t stream = slot_->stream();
  if (!index.centred()) {
    SPILLWAY_CUDA_RETURN_IF_ERROR(
        spec().hash.raw_keys
            ? cudaMemsetAsync(work.centre, 0, sizeof(float) * work.kv_head_count * work.head_dim,
                              stream)
            : LaunchCentre(work, kCentreTokenCount, stream));
  }
  if (spec().hash.kind == HashKind::kRotation) {
    SPILLWAY_CUDA_RETURN_IF_ERROR(
        LaunchEncodeRotation(work, model().rotation(job_->layer), stream));
  }
  if (model().methods() != nullptr) {
    SPILLWAY_CUDA_RETURN_IF_ERROR(model().methods()->Encode(work, job_->layer, stream));
  }
  std::vector<RowCopy> copies;
  index.FillResident(rows, rows.token_count(), copies);
  index.SetCoded(rows.token_count());
  absl::Status status = InPieces(std::span<const RowCopy>(copies), slot_->lists().copies, list_free,
                                 stream, [&](const RowCopy* list, int64_t count) {
                                   return LaunchRowCopies(list, count, spec().row_bytes(), stream);
                                 });
  return status.ok() ? Mark("append") : status;
}

void JobRun::FillStepAppend() {
  AppendLists& lists = slot_->lists();
  std::copy(keys_.begin(), keys_.end(), lists.keys.begin());
  std::copy(key_copies_.begin(), key_copies_.end(), lists.key_copies.begin());
  std::copy(updates_.begin(), updates_.end(), lists.updates.begin());
  lists.counts = {static_cast<int64_t>(updates_.size()), static_cast<int64_t>(key_copies_.size())};
  step_append_.dtype = spec().dtype;
  step_append_.head_dim = spec().head_dim;
  step_append_.row_bytes = spec().row_bytes();
  step_append_.tiling = model().tiling();
  step_append_.bits_per_dim = spec().hash.bits_per_dim;
  step_append_.keys = lists.keys.data();
  step_append_.key_count = static_cast<int>(keys_.size());
  step_append_.updates = lists.updates.data();
  step_append_.copies = lists.key_copies.data();
  step_append_.counts = &lists.counts;
}

absl::Status JobRun::EnqueueAppends() {
  for (JobItem& item : job_->items) {
    if (item.append.has_value()) AppendRows(*item.append);
  }
  std::vector<size_t> longer;
  for (size_t i = 0; i < job_->items.size(); ++i) {
    const JobItem& item = job_->items[i];
    const LayerRows& rows = item.append.has_value() ? *item.append->rows : *item.attend->rows;
    if (absl::Status status = index(i).Update(rows, updates_); !status.ok()) return status;
    if (!item.append.has_value() || !spec().has_index()) continue;
    if (rows.token_count() < kCentreTokenCount) continue;
    if (!AppendsFew(i)) {
      longer.push_back(i);
      continue;
    }
    index(i).AddKeys(rows, model().rotation(job_->layer).transposed, keys_);
    index(i).FillResident(rows, rows.token_count(), key_copies_);
    index(i).SetCoded(rows.token_count());
  }
  // The encoder of many keys reads the tables.
  if (keys_.empty() || !longer.empty() || updates_.size() > AppendLists::kPieceMax) {
    if (absl::Status status = UpdateTables(); !status.ok()) return status;
  }
  for (const size_t i : longer) {
    if (absl::Status status = Encode(i, /*list_free=*/i == longer.front()); !status.ok())
      return status;
  }
  if (keys_.empty()) return absl::OkStatus();
  FillStepAppend();
  // Sparse attends take it into their graph.
  if (!waves_.empty()) return absl::OkStatus();
  SPILLWAY_CUDA_RETURN_IF_ERROR(LaunchStepAppend(std::exchange(step_append_, {}), slot_->stream()));
  return Mark("append");
}

}  // namespace spillway::cuda
