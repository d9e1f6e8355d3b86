#include "gpu/device/append_pipeline.h"

#include <algorithm>
#include <iterator>
#include <span>
#include <string>
#include <utility>

#include "gpu/device/gpu_rows.h"
#include "host/base/status_macros.h"
#include "host/device/append_rows.h"
#include "host/device/errors.h"

namespace spillway::cuda {
namespace {

// Longest append that is part of a step.
constexpr int64_t kFewTokens = 16;
// Rows in GPU memory are coded in stages. Two alternate: one is coded while the next rows go to the
// other. A stage has as many pages as these bytes hold, so that few KV heads make few launches: a
// launch takes as long as one page, and the model's kernels wait for its multiprocessors.
constexpr int64_t kStageBytes = int64_t{8} << 20;
// Pages per KV head, at least. The first pages are coded together, so they must fit into one stage.
constexpr int64_t kStagePagesMin = 32;
static_assert(kStagePagesMin * kPageTokenCount >= kCentreTokenCount);
constexpr int64_t kStages = StreamSlot::kStages;
// Half of a slot's scratch memory: one half is for the first pages, the other for the stages'
// table.
constexpr int64_t kHalfScratchBytes = StreamSlot::kAppendScratchBytes / 2;

// Fewest bytes of a run for the copy engine, on average: its two copies cost about 3 us each.
constexpr int64_t kEngineRunBytesMin = int64_t{512} << 10;

// Copies `all` to a list in pinned memory, one piece at a time, and launches each. free: nothing on
// the stream reads the list yet.
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
  step_.begins = &lists.step_begins;
}

int AppendPipeline::StageHeads() const { return std::min(spec().kv_head_count, kRowsAppendHeads); }

int64_t AppendPipeline::StagePages() const {
  // Little memory has small stages: the slot's part of it is for both.
  const int64_t bytes = std::min(kStageBytes, context_->slot().wave_bytes() / kStages);
  return std::max(kStagePagesMin, bytes / (StageHeads() * kPageTokenCount * spec().row_bytes()));
}

int64_t AppendPipeline::StageBytes() const {
  bool any = false;
  for (const JobItem& item : context_->job().items) any |= item.append && item.append->on_gpu;
  return any ? kStages * StageHeads() * StagePages() * kPageTokenCount * spec().row_bytes() : 0;
}

bool AppendPipeline::ComesFromGpu(size_t item) const {
  JobItem& of_job = context_->item(item);
  const AppendWork& append = *of_job.append;
  for (const auto& [source, name] : {std::pair(&append.k, "k"), std::pair(&append.v, "v")}) {
    of_job.status.Update(CheckInGpu(context_->gpu(), name, source->data));
    of_job.status.Update(
        CheckAligned(name, source->data, source->head_stride, source->token_stride));
  }
  return of_job.status.ok();
}

const std::byte** AppendPipeline::StageTable() const {
  // Rows of at least 16 bytes for each of K and V.
  constexpr int64_t kMost =
      std::max(kRowsAppendHeads * kStagePagesMin, kStageBytes / (kPageTokenCount * 32));
  static_assert(kStages * kMost * sizeof(uint64_t) <= kHalfScratchBytes);
  return reinterpret_cast<const std::byte**>(context_->slot().append_scratch() + kHalfScratchBytes);
}

absl::Status AppendPipeline::FillStagePages(const std::byte* stage) const {
  std::vector<const std::byte*> pages;
  for (int64_t p = 0; p < kStages * StageHeads() * StagePages(); ++p) {
    pages.push_back(stage + p * kPageTokenCount * spec().row_bytes());
  }
  // Small enough that CUDA has copied `pages` when the call returns.
  return ToStatus(cudaMemcpyAsync(StageTable(), pages.data(), pages.size() * sizeof(pages[0]),
                                  cudaMemcpyHostToDevice, context_->stream()),
                  "cudaMemcpyAsync");
}

absl::Status AppendPipeline::EncodeStage(size_t item, const RowsAppend& rows, int64_t stage_page,
                                         cudaStream_t stream) {
  const LayerIndex& index = context_->index(item);
  const RotationWeights weights = context_->model().rotation(context_->layer());
  const HeadIndex heads = index.heads();
  EncodeWork work = index.Work(rows.begin, ClosedPages(rows.end) * kPageTokenCount);
  // The stage's pages replace the pages of the rows.
  work.row_pages = StageTable() + stage_page - rows.begin / kPageTokenCount;
  work.row_page_capacity = rows.stage_pages;
  work.code_pages += rows.first_head * work.code_page_capacity;
  work.kv_head_count = rows.head_count;
  const HeadIndex of_heads = {heads.statistics + rows.first_head,
                              heads.value_centres + rows.first_head * int64_t{spec().head_dim}};
  if (work.begin == 0) {
    static_assert(FirstPagesScratchBytes(kHeadDimMax) <= kHalfScratchBytes);
    SPILLWAY_CUDA_RETURN_IF_ERROR(LaunchEncodeFirstPages(
        work, weights, of_heads, context_->slot().append_scratch(), kHalfScratchBytes, stream));
    work.begin = kCentreTokenCount;
  }
  return ToStatus(LaunchEncodePages(work, weights, of_heads, stream), "LaunchEncodePages");
}

std::vector<AppendPipeline::Run> AppendPipeline::EngineRuns(size_t item) const {
  const AppendWork& append = *context_->item(item).append;
  std::vector<Run> runs;
  if (spec().row_type != RowType::kElements) return {};
  if (!EngineMoves(spec().row_bytes() / 2, append.k.token_stride, append.v.token_stride)) return {};
  const int64_t bytes = append.count * spec().kv_head_count * spec().row_bytes();
  const int64_t end = append.start + append.count;
  for (int h = 0; h < spec().kv_head_count; ++h) {
    for (int64_t token = append.start; token < end; token += runs.back().count) {
      const int64_t adjacent = append.rows->AdjacentRows(h, token, end - token);
      runs.push_back({h, token, EngineRun(*append.rows, h, token, adjacent)});
      if (bytes / std::ssize(runs) < kEngineRunBytesMin) return {};
    }
  }
  return runs;
}

absl::Status AppendPipeline::CopyByEngine(size_t item, const std::vector<Run>& runs) {
  const AppendWork& append = *context_->item(item).append;
  cudaEvent_t half = context_->model().half_appended();
  // As for launches that write to the pages, see AppendFromGpu().
  if (runs.size() > 1) {
    SPILLWAY_CUDA_RETURN_IF_ERROR(cudaStreamWaitEvent(context_->stream(), half));
  }
  for (size_t i = 0; i < runs.size(); ++i) {
    const Run& run = runs[i];
    const int64_t at = run.token - append.start;
    if (i > 0 && i == runs.size() / 2) {
      SPILLWAY_CUDA_RETURN_IF_ERROR(cudaEventRecord(half, context_->stream()));
    }
    SPILLWAY_CUDA_RETURN_IF_ERROR(EngineToRows(
        const_cast<std::byte*>(append.rows->Row(run.kv_head, run.token)), spec().row_bytes(),
        append.k.Row(run.kv_head, at), append.k.token_stride, append.v.Row(run.kv_head, at),
        append.v.token_stride, run.count, context_->stream()));
  }
  return absl::OkStatus();
}

absl::Status AppendPipeline::AppendFromGpu(size_t item, std::byte* stage) {
  const AppendWork& append = *context_->item(item).append;
  LayerIndex& index = context_->index(item);
  const int64_t end = append.start + append.count;
  const bool indexes = spec().has_index() && end >= kCentreTokenCount;
  const bool encodes =
      indexes && context_->model().has_rotation() && !context_->model().methods_encode();
  StreamSlot& slot = context_->slot();
  cudaStream_t stream = context_->stream();
  const int64_t stage_pages = StagePages();
  int64_t stage_count = 0;
  SPILLWAY_CUDA_RETURN_IF_ERROR(cudaMemsetAsync(slot.bad_row(), 0xFF, sizeof(kNoBadRow), stream));
  RowsAppend rows;
  rows.dtype = spec().dtype;
  rows.row_type = spec().row_type;
  rows.head_dim = spec().head_dim;
  rows.row_bytes = spec().row_bytes();
  rows.start = append.start;
  rows.row_page_capacity = index.page_capacity();
  rows.k_head_stride = append.k.head_stride;
  rows.k_token_stride = append.k.token_stride;
  rows.v_head_stride = append.v.head_stride;
  rows.v_token_stride = append.v.token_stride;
  rows.stage_pages = stage_pages;
  rows.bad = slot.bad_row();
  // Encoders that read the pages must not see elements that are not finite, for which the kernel
  // writes zeros. And the copy engine reads the source after the kernel has checked it.
  const bool by_engine = (encodes || !indexes) && !append.read_once;
  const std::vector<Run> runs = by_engine ? EngineRuns(item) : std::vector<Run>();
  rows.writes_pages = runs.empty();
  // With codes, begin at the first page that is not coded yet.
  const int64_t coded = index.coded_page_count() * kPageTokenCount;
  const int64_t first = encodes ? coded : append.start;
  if (encodes) {
    RETURN_IF_ERROR(FillStagePages(stage));
    rows.recent_begin = std::max(index.indexed_token_count(), end - kRecentRows);
    index.FillResident(end, [](int, int64_t, std::byte*, bool) {});
  }
  // One launch per group of heads and stage of pages.
  const auto ceil = [](int64_t count, int64_t of) { return (count + of - 1) / of; };
  const int64_t launch_count =
      ceil(spec().kv_head_count, kRowsAppendHeads) *
      ceil(ceil(end, kPageTokenCount) - first / kPageTokenCount, stage_pages);
  int64_t launched = 0;
  const auto launch = [&]() -> absl::Status {
    cudaEvent_t half = context_->model().half_appended();
    if (!rows.writes_pages) return ToStatus(LaunchRowsAppend(rows, stream), "LaunchRowsAppend");
    if (launched == 0 && launch_count > 1) {
      SPILLWAY_CUDA_RETURN_IF_ERROR(cudaStreamWaitEvent(stream, half));
    }
    SPILLWAY_CUDA_RETURN_IF_ERROR(LaunchRowsAppend(rows, stream));
    if (++launched == launch_count / 2) {
      SPILLWAY_CUDA_RETURN_IF_ERROR(cudaEventRecord(half, stream));
    }
    return absl::OkStatus();
  };
  for (rows.first_head = 0; rows.first_head < spec().kv_head_count;
       rows.first_head += kRowsAppendHeads) {
    rows.head_count = std::min(kRowsAppendHeads, spec().kv_head_count - rows.first_head);
    rows.row_pages = index.row_pages(rows.first_head);
    rows.k = append.k.data + rows.first_head * append.k.head_stride;
    rows.v = append.v.data + rows.first_head * append.v.head_stride;
    for (int h = 0; h < rows.head_count; ++h) {
      ResidentRows& resident = rows.resident[h] = index.resident(rows.first_head + h);
      // Otherwise they are copied when the rows are indexed.
      if (!encodes) resident.pages = nullptr;
      if (!encodes) resident.recent = nullptr;
    }
    for (rows.begin = first; rows.begin < end; rows.begin = rows.end) {
      rows.end = std::min(end, (rows.begin / kPageTokenCount + stage_pages) * kPageTokenCount);
      if (!encodes) {
        RETURN_IF_ERROR(launch());
        continue;
      }
      const int64_t turn = stage_count++ % kStages;
      const int64_t stage_page = turn * StageHeads() * stage_pages;
      rows.stage = stage + stage_page * kPageTokenCount * rows.row_bytes;
      StreamSlot::Stage& events = slot.stages()[turn];
      // Waits until the rows that were in this stage before are coded.
      SPILLWAY_CUDA_RETURN_IF_ERROR(cudaStreamWaitEvent(stream, events.coded.get()));
      RETURN_IF_ERROR(launch());
      SPILLWAY_CUDA_RETURN_IF_ERROR(cudaEventRecord(events.filled.get(), stream));
      SPILLWAY_CUDA_RETURN_IF_ERROR(cudaStreamWaitEvent(slot.side_stream(), events.filled.get()));
      RETURN_IF_ERROR(EncodeStage(item, rows, stage_page, slot.side_stream()));
      SPILLWAY_CUDA_RETURN_IF_ERROR(cudaEventRecord(events.coded.get(), slot.side_stream()));
    }
  }
  RETURN_IF_ERROR(CopyByEngine(item, runs));
  for (const StreamSlot::Stage& events : slot.stages()) {
    SPILLWAY_CUDA_RETURN_IF_ERROR(cudaStreamWaitEvent(stream, events.coded.get()));
  }
  index.whole().SetFilled(end);
  if (encodes) {
    index.SetIndexed(end);
  } else if (indexes) {
    RETURN_IF_ERROR(Index(item, /*list_free=*/true));
  }
  SPILLWAY_CUDA_RETURN_IF_ERROR(cudaMemcpyAsync(&slot.lists().bad_row, slot.bad_row(),
                                                sizeof(kNoBadRow), cudaMemcpyDeviceToHost, stream));
  return context_->Mark("append");
}

void AppendPipeline::Collect() const {
  for (JobItem& item : context_->job().items) {
    if (!item.append.has_value() || !item.append->on_gpu || !item.status.ok()) continue;
    const unsigned long long bad = context_->slot().lists().bad_row;
    if (bad == kNoBadRow) continue;
    item.status = NonFiniteRowError((bad >> 9 & 1) == 0 ? "K" : "V", context_->layer(),
                                    static_cast<int64_t>(bad >> 10 & 1023), bad >> 20,
                                    static_cast<int64_t>(bad & 511));
  }
}

absl::Status AppendPipeline::Enqueue(bool step_later, std::byte* stage) {
  std::vector<JobItem>& items = context_->job().items;
  std::vector<size_t> from_gpu;
  for (size_t i = 0; i < items.size(); ++i) {
    JobItem& item = items[i];
    if (!item.append.has_value()) continue;
    if (!item.append->on_gpu) {
      RETURN_IF_ERROR(AppendRows(spec(), context_->layer(), *item.append));
    } else if (ComesFromGpu(i)) {
      item.append->rows->Commit(item.append->start + item.append->count);
      from_gpu.push_back(i);
    }
  }
  if (from_gpu.size() > 1) return absl::UnimplementedError("a job appends from GPU memory once");
  std::vector<size_t> few, longer;
  std::vector<WholeCopy> fills;
  bool reads_tables = false;
  for (size_t i = 0; i < items.size(); ++i) {
    const JobItem& item = items[i];
    if (!item.status.ok()) continue;
    const LayerRows& rows = item.append.has_value() ? *item.append->rows : *item.attend->rows;
    LayerIndex& index = context_->index(i);
    RETURN_IF_ERROR(index.Update(rows, rows.token_count(), updates_));
    const bool on_gpu = item.append.has_value() && item.append->on_gpu;
    const bool indexes = item.append.has_value() && !on_gpu && spec().has_index() &&
                         rows.token_count() >= kCentreTokenCount;
    if (indexes && AppendsFew(i)) {
      few.push_back(i);
      step_rows_ += NewTokens(i) * spec().kv_head_count;
      reads_tables |= ClosesPages(i);
      index.FillResident(rows, rows.token_count(), step_copies_);
      index.FillWhole(rows, index.indexed_token_count(), rows.token_count(), step_copies_);
    } else if (indexes) {
      longer.push_back(i);
    }
    // Rows from GPU memory are written there by AppendFromGpu().
    fills.push_back(index.FillWhole(on_gpu ? item.append->start : rows.token_count()));
    if (fills.back().begin == fills.back().end) fills.pop_back();
  }
  // Encoders read the tables, and so do the copies of all rows.
  reads_tables |= !longer.empty() || !from_gpu.empty() || !fills.empty();
  if (step_rows_ == 0 || reads_tables || updates_.size() > AppendLists::kPieceMax) {
    RETURN_IF_ERROR(UpdateTables());
  }
  for (const WholeCopy& fill : fills) {
    SPILLWAY_CUDA_RETURN_IF_ERROR(LaunchWholeCopy(fill, context_->stream()));
  }
  for (const size_t i : from_gpu) RETURN_IF_ERROR(AppendFromGpu(i, stage));
  for (const size_t i : few) {
    RETURN_IF_ERROR(EncodePages(i));
    context_->index(i).SetIndexed(items[i].append->rows->token_count());
  }
  for (const size_t i : longer) {
    RETURN_IF_ERROR(Index(i, /*list_free=*/i == longer.front()));
  }
  for (const JobItem& item : items) enqueued_ |= item.append.has_value();
  enqueued_ &= step_rows_ == 0 || !step_later || reads_tables;
  if (step_rows_ == 0) return absl::OkStatus();
  FillStep();
  if (step_later) return absl::OkStatus();
  SPILLWAY_CUDA_RETURN_IF_ERROR(LaunchStepAppend(TakeStep(), context_->stream()));
  return context_->Mark("append");
}

}  // namespace spillway::cuda
