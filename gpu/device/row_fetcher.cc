#include "gpu/device/row_fetcher.h"

#include <algorithm>
#include <chrono>
#include <string_view>
#include <utility>
#include <vector>

#include "gpu/cuda/current_device.h"
#include "gpu/cuda/poll.h"
#include "gpu/device/gpu_rows.h"
#include "host/base/limits.h"
#include "host/base/status_macros.h"

namespace spillway::cuda {
namespace {

// Waits without using a core during a long fetch.
template <typename Query>
absl::Status Await(const Query& query, std::string_view what) {
  return ToStatus(Poll(query, std::chrono::microseconds(200), [] {}), what);
}

// Fewest bytes for the copy engine. Each of its two copies, of K and of V, costs about 3 us beside
// its 55 GB/s: with pieces of 4 MiB it is as fast as a kernel (docs/results/gpu/link.csv), and it
// leaves the model's kernels alone.
constexpr int64_t kEngineBytesMin = int64_t{2} << 20;

FetchTarget TargetOf(const FetchWork& work) {
  return {.format = work.rows.format(),
          .row_bytes = work.rows.row_bytes(),
          .k = work.k.data,
          .v = work.v.data,
          .k_head_stride = work.k.head_stride,
          .k_token_stride = work.k.token_stride,
          .v_head_stride = work.v.head_stride,
          .v_token_stride = work.v.token_stride};
}

}  // namespace

RowFetcher::RowFetcher(const Gpu& gpu, MemoryBudget* device_budget, MemoryBudget* host_budget)
    : gpu_(gpu),
      device_budget_(device_budget),
      host_budget_(host_budget),
      thread_([this] { Serve(); }) {}

RowFetcher::~RowFetcher() {
  {
    const MutexLock lock(mutex_);
    stopping_ = true;
  }
  changed_.NotifyAll();
  thread_.join();
}

void RowFetcher::Fetch(const FetchWork& work, Device::FetchDone done) {
  {
    const MutexLock lock(mutex_);
    waiting_.push_back({&work, std::move(done)});
  }
  changed_.NotifyOne();
}

void RowFetcher::Serve() {
  LetSleepsBeShort();
  for (;;) {
    Task task;
    {
      const MutexLock lock(mutex_);
      while (!stopping_ && waiting_.empty()) changed_.Wait(mutex_);
      if (waiting_.empty()) return;
      task = std::move(waiting_.front());
      waiting_.pop_front();
    }
    absl::Status status = Run(*task.work);
    task.done(std::move(status));
  }
}

absl::Status RowFetcher::Run(const FetchWork& work) {
  const CurrentDevice current(gpu_.ordinal);
  RETURN_IF_ERROR(current.status());
  if (work.row_count() == 0) return absl::OkStatus();
  RETURN_IF_ERROR(CheckTargets(work));
  RETURN_IF_ERROR(Prepare());
  absl::Status status = work.chosen ? CopyChosen(work) : CopyRange(work);
  // Also after an error, so that nothing writes to the tensors afterwards.
  status.Update(Await([this] { return cudaStreamQuery(stream_.get()); }, "a fetch on the GPU"));
  return status;
}

absl::Status RowFetcher::Prepare() {
  if (stream_.get() == nullptr) {
    ASSIGN_OR_RETURN(stream_, Stream::Create());
  }
  for (Event& launched : launched_) {
    if (launched.get() != nullptr) continue;
    ASSIGN_OR_RETURN(launched, Event::Create(/*timing=*/false));
  }
  return absl::OkStatus();
}

absl::Status RowFetcher::PrepareLists() {
  if (stages_.back().done.get() != nullptr) return absl::OkStatus();
  constexpr std::string_view kWhat = "lists of rows to fetch";
  for (Stage& stage : stages_) {
    ASSIGN_OR_RETURN(stage.pinned, PinnedBuffer::Create(sizeof(Lists), host_budget_, kWhat));
    ASSIGN_OR_RETURN(stage.device, DeviceBuffer::Create(sizeof(Lists), device_budget_, kWhat));
    ASSIGN_OR_RETURN(stage.done, Event::Create(/*timing=*/false));
  }
  return absl::OkStatus();
}

absl::Status RowFetcher::CheckTargets(const FetchWork& work) const {
  const int64_t half = work.rows.format().element_bytes() / 2;
  const int last_head = work.chosen ? 0 : work.rows.kv_head_count() - 1;
  const int64_t last_token = work.chosen ? work.row_count() - 1 : work.count - 1;
  for (const auto& [target, name] : {std::pair(&work.k, "k"), std::pair(&work.v, "v")}) {
    const std::byte* const first = target->data;
    const std::byte* const last = target->Row(last_head, last_token) + half - 1;
    RETURN_IF_ERROR(CheckInGpu(gpu_, name, first));
    RETURN_IF_ERROR(CheckInGpu(gpu_, name, last));
    RETURN_IF_ERROR(CheckAligned(name, first, target->head_stride, target->token_stride));
  }
  return absl::OkStatus();
}

absl::StatusOr<RowFetcher::Stage*> RowFetcher::NextStage(const FetchWork& work) {
  if (work.cancel != nullptr) RETURN_IF_ERROR(work.cancel->Check());
  Stage& stage = stages_[turn_++ % kStages];
  RETURN_IF_ERROR(
      Await([&] { return cudaEventQuery(stage.done.get()); }, "a part of a fetch on the GPU"));
  return &stage;
}

absl::Status RowFetcher::Launch(Stage& stage, int64_t pages, RowsFetch fetch) {
  const auto upload = [&](auto& to, const auto& from, int64_t count) {
    return cudaMemcpyAsync(to.data(), from.data(), count * sizeof(from[0]), cudaMemcpyHostToDevice,
                           stream_.get());
  };
  SPILLWAY_CUDA_RETURN_IF_ERROR(upload(stage.on_gpu().pages, stage.host().pages, pages));
  SPILLWAY_CUDA_RETURN_IF_ERROR(upload(stage.on_gpu().slots, stage.host().slots, fetch.row_count));
  fetch.pages = stage.on_gpu().pages.data();
  fetch.slots = stage.on_gpu().slots.data();
  SPILLWAY_CUDA_RETURN_IF_ERROR(LaunchRowsFetch(fetch, stream_.get()));
  return ToStatus(cudaEventRecord(stage.done.get(), stream_.get()), "cudaEventRecord");
}

absl::StatusOr<cudaEvent_t> RowFetcher::NextLaunch(const FetchWork& work) {
  if (work.cancel != nullptr) RETURN_IF_ERROR(work.cancel->Check());
  cudaEvent_t launched = launched_[launch_++ % kLaunches].get();
  RETURN_IF_ERROR(Await([&] { return cudaEventQuery(launched); }, "a part of a fetch on the GPU"));
  return launched;
}

absl::Status RowFetcher::Launch(const FetchWork& work, PagesFetch& fetch) {
  if (fetch.piece_count == 0) return absl::OkStatus();
  ASSIGN_OR_RETURN(cudaEvent_t launched, NextLaunch(work));
  SPILLWAY_CUDA_RETURN_IF_ERROR(LaunchPagesFetch(fetch, stream_.get()));
  fetch.piece_count = 0;
  return ToStatus(cudaEventRecord(launched, stream_.get()), "cudaEventRecord");
}

absl::Status RowFetcher::CopyByEngine(const FetchWork& work, int kv_head, int64_t token,
                                      int64_t count) {
  ASSIGN_OR_RETURN(cudaEvent_t launched, NextLaunch(work));
  const int64_t at = token - work.start;
  SPILLWAY_CUDA_RETURN_IF_ERROR(EngineFromRows(
      work.rows.Row(kv_head, token), work.rows.row_bytes(), work.k.Row(kv_head, at),
      work.k.token_stride, work.v.Row(kv_head, at), work.v.token_stride, count, stream_.get()));
  return ToStatus(cudaEventRecord(launched, stream_.get()), "cudaEventRecord");
}

absl::Status RowFetcher::CopyRange(const FetchWork& work) {
  const int64_t end = work.start + work.count;
  const int64_t row_bytes = work.rows.row_bytes();
  const bool engine_moves = work.rows.format().type == RowType::kElements &&
                            EngineMoves(row_bytes / 2, work.k.token_stride, work.v.token_stride);
  PagesFetch fetch;
  fetch.to = TargetOf(work);
  for (int h = 0; h < work.rows.kv_head_count(); ++h) {
    int64_t adjacent = 0;  // rows from `token` on
    for (int64_t token = work.start; token < end;) {
      if (adjacent == 0) adjacent = work.rows.AdjacentRows(h, token, end - token);
      if (engine_moves && adjacent * row_bytes >= kEngineBytesMin) {
        const int64_t run = EngineRun(work.rows, h, token, adjacent);
        if (run * row_bytes >= kEngineBytesMin) {
          RETURN_IF_ERROR(CopyByEngine(work, h, token, run));
          token += run;
          adjacent -= run;
          continue;
        }
      }
      const int64_t count = std::min(kPageTokenCount - token % kPageTokenCount, end - token);
      adjacent -= count;
      fetch.pieces[fetch.piece_count++] = {work.rows.Row(h, token),
                                           static_cast<uint32_t>(token - work.start),
                                           static_cast<uint16_t>(h), static_cast<uint16_t>(count)};
      if (fetch.piece_count == PagesFetch::kPieceCountMax) RETURN_IF_ERROR(Launch(work, fetch));
      token += count;
    }
  }
  return Launch(work, fetch);
}

absl::Status RowFetcher::CopyChosen(const FetchWork& work) {
  RETURN_IF_ERROR(PrepareLists());
  Stage* stage = nullptr;
  int64_t pages = 0, rows = 0, written = 0;
  const auto launch = [&]() -> absl::Status {
    if (rows == 0) return absl::OkStatus();
    RowsFetch fetch;
    fetch.to = TargetOf(work);
    fetch.to.k = work.k.Row(0, written);
    fetch.to.v = work.v.Row(0, written);
    fetch.row_count = static_cast<uint32_t>(rows);
    written += rows;
    const int64_t row_pages = std::exchange(pages, 0);
    rows = 0;
    return Launch(*stage, row_pages, fetch);
  };
  for (size_t h = 0; h < work.chosen->size(); ++h) {
    int64_t page = -1;  // last page listed
    for (const uint32_t token : (*work.chosen)[h]) {
      if (rows == 0) {
        ASSIGN_OR_RETURN(stage, NextStage(work));
        page = -1;
      }
      if (token / kPageTokenCount != page) {
        page = token / kPageTokenCount;
        stage->host().pages[pages++] = work.rows.Page(static_cast<int>(h), page);
      }
      stage->host().slots[rows++] =
          static_cast<uint32_t>((pages - 1) * kPageTokenCount + token % kPageTokenCount);
      if (rows == kRowsMax) RETURN_IF_ERROR(launch());
    }
  }
  return launch();
}

}  // namespace spillway::cuda
