// What a job's attends put on its slot's stream.
#include <algorithm>
#include <bit>
#include <utility>

#include "gpu/device/job_run.h"
#include "gpu/kernels/methods.h"

namespace spillway::cuda {
namespace {

// Blocks that gather rows; see docs/link.md: more SMs hold more addresses in
// flight than are translated.
constexpr int kGatherBlocks = 8;
constexpr int64_t kReferencePagesStep = 16;

// Tokens that grids are made for, of a unit of n.
int64_t GridTokens(int64_t n) {
  const auto sixteenth = static_cast<int64_t>(std::bit_floor(static_cast<uint64_t>(n)) / 16);
  return RoundUp(n, std::max<int64_t>(kChunkTokens, sixteenth));
}

}  // namespace

Wave JobRun::View(const SparseWave& wave) const {
  Wave w;
  w.shape = Shape(wave);
  w.host_units = wave.requests;
  w.host_q = wave.q;
  w.units = device_requests_;
  w.unit_count = static_cast<int>(wave.units.size());
  for (int i = 0; i < w.unit_count; ++i) {
    const UnitRequest& r = wave.requests[i];
    // Rounded up, so that the wave of the next step is the same.
    w.token_count_max = std::max(w.token_count_max, GridTokens(r.n));
    w.reference_pages_max =
        std::max(w.reference_pages_max,
                 RoundUp(r.sample_token_count / kPageTokenCount, kReferencePagesStep));
    w.has_tail |= r.terms.tail != Tail::kNone;
  }
  w.tail_kernels = FindTailKernels(attend(wave.units.front().item).policy.tail);
  w.methods = wave.methods;
  w.first = FirstShape(wave);
  w.append = step_append_;
  w.sm_count = gpu_.sm_count;
  w.bulk_copies = w.overlap = gpu_.hopper;
  w.gather_blocks = kGatherBlocks;
  return w;
}

absl::Status JobRun::Launch(SparseWave& wave) {
  const Wave w = View(wave);
  cudaStream_t stream = slot_->stream();
  if (w.methods.shape != nullptr) {
    SPILLWAY_CUDA_RETURN_IF_ERROR(
        model().methods()->LaunchAhead(w.methods, attend(wave.units.front().item).policy,
                                       job_->layer, wave.q, w.unit_count, stream));
  }
  // Events between the kernels are of one job alone.
  absl::Status status = job_->trace
                            ? LaunchKernels(w)
                            : slot_->graphs().Run(w, stream, [&] { return LaunchKernels(w); });
  step_append_ = {};
  if (status.ok() && wave.select_only) status = CollectSelections(wave);
  return status;
}

absl::Status JobRun::LaunchKernels(const Wave& wave) {
  cudaStream_t stream = slot_->stream();
  absl::Status status = Mark("begin");
  const auto stage = [&](std::string_view name, cudaError_t error) {
    if (status.ok()) status = ToStatus(error, name);
    if (status.ok()) status = Mark(name);
  };
  if (wave.methods.request_bytes > 0 && status.ok()) {
    // Ahead of kernels that may overlap: what a method's kernels read lies there.
    status = ToStatus(cudaMemcpyAsync(wave.methods.units, wave.methods.host_units,
                                      static_cast<size_t>(wave.methods.request_bytes),
                                      cudaMemcpyHostToDevice, stream),
                      "cudaMemcpyAsync");
  }
  if (wave.append.key_count > 0) stage("append", LaunchStepAppend(wave.append, stream));
  if (wave.first) {
    Wave first = wave;
    first.shape = *wave.first;
    first.first.reset();
    const SelectorKernels& kernels = *FindSelectorKernels(first.shape.selector);
    stage("first query", kernels.prepare(first, stream));
    stage("first reference", kernels.reference(first, stream));
    stage("first score", kernels.score(first, stream));
    stage("candidates", BuiltMethods().first_selection->find(first, stream));
  }
  const SelectorKernels& kernels = *FindSelectorKernels(wave.shape.selector);
  stage("query", kernels.prepare(wave, stream));
  stage("reference", kernels.reference(wave, stream));
  stage("score", kernels.score(wave, stream));
  if (wave.first) stage("drop", BuiltMethods().first_selection->drop_others(wave, stream));
  if (wave.shape.by_mass) stage("mass", LaunchMassSets(wave, stream));
  stage("cut", LaunchCut(wave, stream));
  stage("pilot", LaunchSample(wave, 0, stream));
  stage("pilot gather", LaunchGather(wave, stream));
  stage("pilot fold", LaunchFold(wave, 0, stream));
  if (wave.tail_kernels != nullptr) {
    stage(wave.tail_kernels->stage, wave.tail_kernels->sample(wave, stream));
    stage("sample fold", wave.tail_kernels->fold(wave, stream));
  } else if (wave.has_tail) {
    stage("budget", LaunchBudget(wave, stream));
    stage("sample", LaunchSample(wave, 1, stream));
    stage("sample gather", LaunchGather(wave, stream));
    stage("sample fold", LaunchFold(wave, 1, stream));
  }
  stage("finish", LaunchFinish(wave, stream));
  return status;
}

absl::Status JobRun::Launch(DensePart& part) {
  DenseWave w;
  w.dtype = spec().dtype;
  w.head_dim = spec().head_dim;
  w.row_bytes = spec().row_bytes();
  w.scale = static_cast<float>(spec().softmax_scale);
  w.units = device_units_;
  w.unit_count = static_cast<int>(part.blocks.size());
  w.cancel = slot_->cancel();
  cudaStream_t stream = slot_->stream();
  SPILLWAY_CUDA_RETURN_IF_ERROR(cudaMemcpyAsync(const_cast<DenseUnit*>(device_units_), part.units,
                                                static_cast<size_t>(request_bytes_),
                                                cudaMemcpyHostToDevice, stream));
  // 0xFF in every byte: no token.
  SPILLWAY_CUDA_RETURN_IF_ERROR(cudaMemsetAsync(part.units[0].error_token, 0xFF,
                                                sizeof(uint32_t) * part.blocks.size(), stream));
  int64_t n = 0;
  for (const DenseBlock& block : part.blocks) {
    n = std::max(n, block.unit.n);
    w.split_count_max = std::max(w.split_count_max, block.unit.split_count);
  }
  if (Cancelled()) {
    // Only what says that no token was bad.
  } else if (!part.staged) {
    w.limit = n;
    SPILLWAY_CUDA_RETURN_IF_ERROR(LaunchDenseFold(w, stream));
  } else {
    const LayerIndex& layer = index(part.blocks.front().item);
    constexpr int64_t kStageTokens = kStagePages * kPageTokenCount;
    w.split_count_max = kStageTokens / kStagedSplitRows;
    for (w.first = 0; w.first < n && !Cancelled(); w.first += kStageTokens) {
      w.limit = w.first + kStageTokens;
      const int64_t first_page = w.first / kPageTokenCount;
      const int64_t pages =
          std::min(kStagePages, (n + kPageTokenCount - 1) / kPageTokenCount - first_page);
      for (int h = 0; h < spec().kv_head_count; ++h) {
        SPILLWAY_CUDA_RETURN_IF_ERROR(LaunchStagePages(
            layer.row_pages(h) + first_page, 0, 1, pages, kPageTokenCount * spec().row_bytes(),
            stage_ + h * kStagePages * kPageTokenCount * spec().row_bytes(), stream));
      }
      SPILLWAY_CUDA_RETURN_IF_ERROR(LaunchDenseFold(w, stream));
    }
  }
  SPILLWAY_CUDA_RETURN_IF_ERROR(LaunchDenseFinish(w, stream));
  return Mark("dense");
}

bool JobRun::Cancelled() {
  // A stream slot takes so many launches: enqueuing may wait for the GPU.
  if (job_->cancel != nullptr && !job_->cancel->Check().ok()) *slot_->cancel() = 1;
  return *slot_->cancel() != 0;
}

absl::Status JobRun::Mark(std::string_view stage) {
  if (!job_->trace) return absl::OkStatus();
  absl::StatusOr<Event> event = Event::Create(/*timing=*/true);
  if (!event.ok()) return event.status();
  SPILLWAY_CUDA_RETURN_IF_ERROR(cudaEventRecord(event->get(), slot_->stream()));
  marks_.emplace_back(stage, *std::move(event));
  return absl::OkStatus();
}

}  // namespace spillway::cuda
