#include "gpu/device/dense_pipeline.h"

#include <algorithm>

#include "host/base/status_macros.h"
#include "host/device/errors.h"
#include "host/device/results.h"

namespace spillway::cuda {
namespace {

// Pages per KV head that a run of many queries brings over at a time, and rows
// of its splits.
constexpr int64_t kStagePages = 64;
constexpr int64_t kStagedSplitRows = 2048;
constexpr int64_t kSplitRowsLeast = 256;
constexpr int64_t kDenseSplitsWanted = 256;
constexpr int64_t kPartialBytes = int64_t{256} << 20;

}  // namespace

int64_t DensePipeline::StageBytes() const {
  return kStagePages * kPageTokenCount * spec().row_bytes();
}

void DensePipeline::Add(size_t item, int64_t begin, int64_t end) {
  const AttendQuery& w = context_->attend(item);
  AttendResult& result = context_->item(item).result;
  FillDenseResult(spec(), w, begin, end, result);
  if (w.select_only) return;
  const int group = spec().group();
  const int64_t queries = std::max<int64_t>(1, kDenseQueryRows / group);
  const bool staged = end - begin > queries;
  for (int64_t t = begin; t < end; t += queries) {
    const int64_t block_end = std::min(t + queries, end);
    const int64_t n = *std::max_element(w.visible.begin() + t, w.visible.begin() + block_end);
    const int64_t split_rows =
        staged ? kStagedSplitRows
               : std::max(kSplitRowsLeast,
                          RoundUp((n + kDenseSplitsWanted - 1) / kDenseSplitsWanted, 32));
    const int64_t splits = (n + split_rows - 1) / split_rows;
    const int64_t bytes =
        splits * kDenseQueryRows * (2 + spec().head_dim) * 4 * int64_t{spec().kv_head_count};
    // Runs that read their rows in place share parts; one that stages them has
    // parts of its own, each of which brings the rows over anew.
    const bool fits = !parts_.empty() && parts_.back().staged == staged && (!staged || t > begin) &&
                      parts_.back().partial_bytes + bytes <=
                          std::min(kPartialBytes, context_->slot().wave_bytes());
    if (!fits) parts_.emplace_back().staged = staged;
    if (!fits || !staged) result.moved_row_count += n * spec().kv_head_count;
    Part& part = parts_.back();
    part.partial_bytes += bytes;
    for (int h = 0; h < spec().kv_head_count; ++h) {
      Block& block = part.blocks.emplace_back();
      block.item = item;
      block.begin = t;
      block.end = block_end;
      block.kv_head = h;
      block.unit.query_rows = static_cast<int32_t>((block_end - t) * group);
      block.unit.n = n;
      block.unit.split_rows = split_rows;
      block.unit.split_count = splits;
      for (int r = 0; r < block.unit.query_rows; ++r) {
        block.unit.visible[r] = w.visible[t + r / group];
      }
    }
  }
}

DensePipeline::PartMemory DensePipeline::LayOut(Part& part, Carver& pinned,
                                                Carver& workspace) const {
  const int d = spec().head_dim;
  const auto count = static_cast<int64_t>(part.blocks.size());
  const int64_t stage_pages = part.staged ? spec().kv_head_count * kStagePages : 0;
  PartMemory memory;
  const int64_t before = pinned.bytes();
  part.units = pinned.Take<DenseUnit>(count);
  part.q = pinned.Take<float>(count * kDenseQueryRows * d);
  part.stage_table = pinned.Take<const std::byte*>(stage_pages);
  memory.request_bytes = pinned.bytes() - before;
  part.out = pinned.Take<float>(count * kDenseQueryRows * d);
  part.lse = pinned.Take<float>(count * kDenseQueryRows);
  part.errors = pinned.Take<uint32_t>(count);

  memory.units = workspace.Take<DenseUnit>(count);
  memory.q = workspace.Take<float>(count * kDenseQueryRows * d);
  memory.stage_table = workspace.Take<const std::byte*>(stage_pages);
  memory.stage = workspace.Take<std::byte>(part.staged ? spec().kv_head_count * StageBytes() : 0);
  memory.errors = workspace.Take<uint32_t>(count);
  for (Block& block : part.blocks) {
    DenseUnit& unit = block.unit;
    unit.partials = workspace.Take<float>(unit.split_count * unit.query_rows * (2 + d));
  }
  return memory;
}

int64_t DensePipeline::Reserve(Carver& pinned) {
  int64_t bytes = 0;
  for (Part& part : parts_) {
    Carver workspace;
    LayOut(part, pinned, workspace);
    bytes = std::max(bytes, workspace.bytes());
  }
  return bytes;
}

void DensePipeline::Fill(Part& part, const PartMemory& memory) const {
  const int d = spec().head_dim;
  for (size_t i = 0; i < part.blocks.size(); ++i) {
    Block& block = part.blocks[i];
    DenseUnit& unit = block.unit;
    unit.q = memory.q + i * kDenseQueryRows * d;
    unit.row_pages = part.staged ? memory.stage_table + block.kv_head * kStagePages
                                 : context_->index(block.item).row_pages(block.kv_head);
    unit.error_token = memory.errors + i;
    unit.out = part.out + i * kDenseQueryRows * d;
    unit.lse = part.lse + i * kDenseQueryRows;
    unit.result_error = part.errors + i;
    part.units[i] = unit;
    for (int64_t t = block.begin; t < block.end; ++t) {
      context_->ToFloats(block.item, t, block.kv_head,
                         part.q + (i * kDenseQueryRows + (t - block.begin) * spec().group()) * d);
    }
  }
  if (!part.staged) return;
  for (int64_t p = 0; p < spec().kv_head_count * kStagePages; ++p) {
    part.stage_table[p] = memory.stage + p * kPageTokenCount * spec().row_bytes();
  }
}

absl::Status DensePipeline::Enqueue(Carver& pinned, std::byte* workspace) {
  for (Part& part : parts_) {
    Carver carver(workspace);
    const PartMemory memory = LayOut(part, pinned, carver);
    Fill(part, memory);
    RETURN_IF_ERROR(Launch(part, memory));
  }
  return absl::OkStatus();
}

absl::Status DensePipeline::Launch(const Part& part, const PartMemory& memory) {
  DenseWave wave;
  wave.dtype = spec().dtype;
  wave.head_dim = spec().head_dim;
  wave.row_bytes = spec().row_bytes();
  wave.scale = static_cast<float>(spec().softmax_scale);
  wave.units = memory.units;
  wave.unit_count = static_cast<int>(part.blocks.size());
  wave.cancel = context_->slot().cancel();
  cudaStream_t stream = context_->stream();
  SPILLWAY_CUDA_RETURN_IF_ERROR(cudaMemcpyAsync(memory.units, part.units,
                                                static_cast<size_t>(memory.request_bytes),
                                                cudaMemcpyHostToDevice, stream));
  // 0xFF in every byte: no token.
  SPILLWAY_CUDA_RETURN_IF_ERROR(
      cudaMemsetAsync(memory.errors, 0xFF, sizeof(uint32_t) * part.blocks.size(), stream));
  RETURN_IF_ERROR(Fold(part, memory, wave));
  SPILLWAY_CUDA_RETURN_IF_ERROR(LaunchDenseFinish(wave, stream));
  return context_->Mark("dense");
}

absl::Status DensePipeline::Fold(const Part& part, const PartMemory& memory, DenseWave wave) {
  cudaStream_t stream = context_->stream();
  int64_t n = 0;
  for (const Block& block : part.blocks) {
    n = std::max(n, block.unit.n);
    wave.split_count_max = std::max(wave.split_count_max, block.unit.split_count);
  }
  // Cancelled, no fold: finishing says that no token was bad.
  if (context_->Cancelled()) return absl::OkStatus();
  if (!part.staged) {
    wave.limit = n;
    return ToStatus(LaunchDenseFold(wave, stream), "LaunchDenseFold");
  }
  const LayerIndex& layer = context_->index(part.blocks.front().item);
  constexpr int64_t kStageTokens = kStagePages * kPageTokenCount;
  wave.split_count_max = kStageTokens / kStagedSplitRows;
  for (wave.first = 0; wave.first < n && !context_->Cancelled(); wave.first += kStageTokens) {
    wave.limit = wave.first + kStageTokens;
    const int64_t first_page = wave.first / kPageTokenCount;
    const int64_t pages =
        std::min(kStagePages, (n + kPageTokenCount - 1) / kPageTokenCount - first_page);
    for (int h = 0; h < spec().kv_head_count; ++h) {
      SPILLWAY_CUDA_RETURN_IF_ERROR(LaunchStagePages(layer.row_pages(h) + first_page, 0, 1, pages,
                                                     kPageTokenCount * spec().row_bytes(),
                                                     memory.stage + h * StageBytes(), stream));
    }
    SPILLWAY_CUDA_RETURN_IF_ERROR(LaunchDenseFold(wave, stream));
  }
  return absl::OkStatus();
}

void DensePipeline::Collect() const {
  for (const Part& part : parts_) Collect(part);
}

void DensePipeline::Collect(const Part& part) const {
  const int group = spec().group();
  const int d = spec().head_dim;
  for (size_t i = 0; i < part.blocks.size(); ++i) {
    const Block& block = part.blocks[i];
    JobItem& item = context_->item(block.item);
    AttendResult& result = item.result;
    if (part.errors[i] != kNoToken) {
      item.status.Update(NonFiniteLogitError(part.errors[i], context_->layer(), block.kv_head));
      continue;
    }
    for (int r = 0; r < block.unit.query_rows; ++r) {
      const int64_t at =
          (block.begin + r / group) * spec().query_head_count + block.kv_head * group + r % group;
      const int64_t from = static_cast<int64_t>(i) * kDenseQueryRows + r;
      std::copy_n(part.out + from * d, d, result.out.data() + at * d);
      result.lse[at] = part.lse[from];
    }
  }
}

}  // namespace spillway::cuda
