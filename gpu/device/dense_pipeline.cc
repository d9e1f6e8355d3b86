#include "gpu/device/dense_pipeline.h"

#include <algorithm>
#include <utility>

#include "host/base/status_macros.h"
#include "host/device/errors.h"
#include "host/device/results.h"

namespace spillway::cuda {
namespace {

// Pages per KV head in one stage, for runs of many queries.
constexpr int64_t kStagePages = 64;
// Splits of rows that are read in place: at least so many rows in each, and at most so many splits
// of a KV head. A sum's order depends on them, so they depend neither on what else runs nor on how
// many KV heads the model has here: it may be a part of a larger one.
constexpr int64_t kSplitRowsLeast = 64;
constexpr int64_t kHeadSplits = 128;
// Blocks or warps that read over the link. They keep enough bytes in flight.
constexpr int kLinkWorkers = 64;
// Rows are read over the link if at least one of so many is in host memory.
constexpr int64_t kLinkShare = 16;
constexpr int64_t kPartialBytes = int64_t{256} << 20;
// The grids of a step are rounded up to a multiple of this many splits.
constexpr int64_t kSplitStep = 64;

}  // namespace

int64_t DensePipeline::StageBytes() const {
  return kStagePages * kPageTokenCount * spec().row_bytes();
}

int64_t DensePipeline::SplitsOf(int64_t n, bool staged) {
  if (staged) return (n + kStagedSplitRows - 1) / kStagedSplitRows;
  return std::min((n + kSplitRowsLeast - 1) / kSplitRowsLeast, kHeadSplits);
}

int64_t DensePipeline::RoomOf(int64_t n, bool staged) const {
  return SplitsOf(context_->step() == nullptr ? n : context_->TokenCapacity(n), staged);
}

int64_t DensePipeline::PartialBytesMax() const {
  const int64_t bytes = context_->workspace_bytes();
  return std::min(kPartialBytes, context_->step() == nullptr ? bytes : bytes / 2);
}

void DensePipeline::Clear() {
  for (Part& part : parts_) {
    part.blocks.clear();
    spare_.push_back(std::move(part.blocks));
  }
  parts_.clear();
  follows_append_ = false;
}

void DensePipeline::Add(size_t item, int64_t begin, int64_t end) {
  const AttendQuery& w = context_->attend(item);
  AttendResult& result = context_->item(item).result;
  FillDenseResult(spec(), w, begin, end, result);
  if (w.select_only) return;
  const int group = spec().group();
  const int64_t queries = std::max<int64_t>(1, kDenseQueryRows / group);
  // Not in a step: its launches must not depend on the number of rows.
  const bool staged = end - begin > queries && context_->step() == nullptr;
  for (int64_t t = begin; t < end; t += queries) {
    const int64_t block_end = std::min(t + queries, end);
    const int64_t n = *std::max_element(w.visible.begin() + t, w.visible.begin() + block_end);
    const int64_t bytes = RoomOf(n, staged) * kDenseQueryRows * (2 + spec().head_dim) * 4 *
                          int64_t{spec().group_count()};
    const bool by_warps =
        !staged && DenseByWarps(spec().row_format(), static_cast<int>(block_end - t) * group);
    // Runs that read their rows in place share parts with those of their kind. A run that stages
    // them has parts of its own, each of which copies the rows again.
    const auto takes = [&](const Part& part) {
      return part.staged == staged && part.by_warps == by_warps &&
             part.partial_bytes + bytes <= PartialBytesMax();
    };
    auto found = std::ranges::find_if(parts_, takes);
    if (staged) found = t > begin && takes(parts_.back()) ? parts_.end() - 1 : parts_.end();
    const bool fits = found != parts_.end();
    if (!fits) {
      found = parts_.emplace(parts_.end());
      found->staged = staged;
      found->by_warps = by_warps;
      if (!spare_.empty()) {
        found->blocks = std::move(spare_.back());
        spare_.pop_back();
      }
    }
    Part& part = *found;
    if (!fits || !staged) {
      const int64_t held = std::min(n, context_->index(item).whole().end());
      // A stage brings rows once for all groups of a KV head.
      result.moved_row_count += (n - held) * (staged ? spec().kv_head_count : spec().group_count());
      part.row_count += n;
      part.host_row_count += n - held;
    }
    part.partial_bytes += bytes;
    for (int g = 0; g < spec().group_count(); ++g) {
      Block& block = part.blocks.emplace_back();
      block.item = item;
      block.begin = t;
      block.end = block_end;
      block.group_index = g;
      block.kv_head = spec().KvHeadOf(g);
      block.unit.query_rows = static_cast<int32_t>((block_end - t) * group);
      block.unit.n = n;
      block.unit.staged = staged;
      block.unit.split_count = SplitsOf(n, staged);
      block.unit.first_split = static_cast<int32_t>(part.split_count);
      part.split_count += block.unit.split_count;
      for (int r = 0; r < block.unit.query_rows; ++r) {
        block.unit.visible[r] = w.visible[t + r / group];
      }
    }
  }
}

void DensePipeline::LayOut(Part& part, Carver& requests, Carver& results, Carver& workspace) const {
  const int d = spec().head_dim;
  const auto count = static_cast<int64_t>(part.blocks.size());
  const bool of_step = context_->step() != nullptr;
  const int64_t stage_pages = part.staged ? spec().kv_head_count * kStagePages : 0;
  const int64_t q_floats = count * kDenseQueryRows * d;
  const int64_t before = requests.bytes();
  part.units = requests.Take<DenseUnit>(count);
  if (!of_step) part.q = requests.Take<float>(q_floats);
  part.stage_table = requests.Take<const std::byte*>(stage_pages);
  part.request_bytes = requests.bytes() - before;
  if (!of_step) part.out = results.Take<float>(q_floats);
  part.lse = results.Take<float>(count * kDenseQueryRows);
  part.results = results.Take<DenseResult>(count);

  part.device_units = workspace.Take<DenseUnit>(of_step ? 0 : count);
  part.device_q = workspace.Take<float>(of_step ? 0 : q_floats);
  part.device_stage_table = workspace.Take<const std::byte*>(stage_pages);
  part.stage = workspace.Take<std::byte>(part.staged ? spec().kv_head_count * StageBytes() : 0);
  part.errors = workspace.Take<uint32_t>(count + 1);
  for (Block& block : part.blocks) {
    DenseUnit& unit = block.unit;
    unit.partials = workspace.Take<float>(RoomOf(unit.n, unit.staged) * unit.query_rows * (2 + d));
  }
}

int64_t DensePipeline::Reserve(Carver& requests, Carver& results) {
  int64_t bytes = 0;
  for (Part& part : parts_) {
    Carver workspace;
    LayOut(part, requests, results, workspace);
    bytes = std::max(bytes, workspace.bytes());
  }
  return bytes;
}

void DensePipeline::Fill(Part& part) const {
  const int d = spec().head_dim;
  const bool of_step = context_->step() != nullptr;
  for (size_t i = 0; i < part.blocks.size(); ++i) {
    Block& block = part.blocks[i];
    DenseUnit& unit = block.unit;
    unit.place = {static_cast<int32_t>(block.item), static_cast<int16_t>(block.begin),
                  static_cast<int16_t>(block.group_index)};
    unit.row_pages = part.staged ? part.device_stage_table + block.kv_head * kStagePages
                                 : context_->index(block.item).read_pages(block.kv_head);
    unit.over_link = !part.staged && part.host_row_count * kLinkShare >= part.row_count;
    unit.sinks = context_->model().sinks(context_->layer(), block.group_index);
    unit.error_token = part.errors + i;
    unit.result = part.results + i;
    unit.lse = part.lse + i * kDenseQueryRows;
    if (!of_step) {
      unit.q = part.device_q + i * kDenseQueryRows * d;
      unit.out = part.out + i * kDenseQueryRows * d;
    }
    // Kernels do not write all of it, and an earlier step may have used its memory for other units.
    if (of_step) unit.result->report = {};
    part.units[i] = unit;
    for (int64_t t = block.begin; t < block.end && !of_step; ++t) {
      context_->ToFloats(block.item, t, block.group_index,
                         part.q + (i * kDenseQueryRows + (t - block.begin) * spec().group()) * d);
    }
  }
  if (!part.staged) return;
  for (int64_t p = 0; p < spec().kv_head_count * kStagePages; ++p) {
    part.stage_table[p] = part.stage + p * kPageTokenCount * spec().row_bytes();
  }
}

void DensePipeline::Prepare(Carver& requests, Carver& results, std::byte* workspace) {
  for (Part& part : parts_) {
    Carver carver(workspace);
    LayOut(part, requests, results, carver);
    Fill(part);
  }
}

std::span<uint32_t> DensePipeline::clear() const {
  if (!follows_append_) return {};
  return {parts_.front().errors, parts_.front().blocks.size() + 1};
}

absl::Status DensePipeline::Launch(cudaStream_t stream) {
  for (const Part& part : parts_) RETURN_IF_ERROR(Launch(part, stream));
  return absl::OkStatus();
}

std::vector<DenseWave> DensePipeline::Views() const {
  std::vector<DenseWave> views;
  views.reserve(parts_.size());
  for (const Part& part : parts_) views.push_back(View(part));
  return views;
}

DenseWave DensePipeline::View(const Part& part) const {
  DenseWave wave;
  wave.dtype = spec().dtype;
  wave.head_dim = spec().head_dim;
  wave.group = spec().group();
  wave.row_type = spec().row_type;
  wave.row_bytes = spec().row_bytes();
  wave.scale = static_cast<float>(spec().softmax_scale);
  wave.units = part.device_units;
  wave.unit_count = static_cast<int>(part.blocks.size());
  wave.sm_count = context_->gpu().sm_count;
  wave.block_shared_bytes = context_->gpu().block_shared_bytes;
  wave.cancel = context_->cancel();
  wave.running = part.errors + part.blocks.size();
  wave.limit = INT64_MAX;
  wave.link_workers = kLinkWorkers;
  wave.by_warps = part.by_warps;
  wave.overlap = context_->gpu().hopper;
  wave.follows_append = follows_append_;
  for (const Block& block : part.blocks) {
    wave.split_count_max = std::max(wave.split_count_max, block.unit.split_count);
    wave.query_rows_max = std::max(wave.query_rows_max, block.unit.query_rows);
  }
  if (const StepContext* step = context_->step(); step != nullptr) {
    wave.units = context_->Uploaded(part.units);
    wave.split_count_max = RoundUp(wave.split_count_max, kSplitStep);
    wave.step = step->tensors;
  }
  return wave;
}

absl::Status DensePipeline::Launch(const Part& part, cudaStream_t stream) {
  const DenseWave wave = View(part);
  if (context_->step() == nullptr) {
    SPILLWAY_CUDA_RETURN_IF_ERROR(cudaMemcpyAsync(part.device_units, part.units,
                                                  static_cast<size_t>(part.request_bytes),
                                                  cudaMemcpyHostToDevice, stream));
  }
  if (!follows_append_) {
    // 0xFF in every byte means no token, and that the work goes on.
    SPILLWAY_CUDA_RETURN_IF_ERROR(
        cudaMemsetAsync(part.errors, 0xFF, sizeof(uint32_t) * (part.blocks.size() + 1), stream));
  }
  RETURN_IF_ERROR(Fold(part, wave, stream));
  SPILLWAY_CUDA_RETURN_IF_ERROR(LaunchDenseFinish(wave, stream));
  return context_->Mark("dense");
}

absl::Status DensePipeline::Fold(const Part& part, DenseWave wave, cudaStream_t stream) {
  // If cancelled, fold nothing; LaunchDenseFinish() then reports no bad token.
  if (context_->Cancelled()) return absl::OkStatus();
  if (!part.staged) return ToStatus(LaunchDenseFold(wave, stream), "LaunchDenseFold");
  int64_t n = 0;
  for (const Block& block : part.blocks) n = std::max(n, block.unit.n);
  const LayerIndex& layer = context_->index(part.blocks.front().item);
  constexpr int64_t kStageTokens = kStagePages * kPageTokenCount;
  wave.split_count_max = kStageTokens / kStagedSplitRows;
  for (wave.first = 0; wave.first < n && !context_->Cancelled(); wave.first += kStageTokens) {
    wave.limit = wave.first + kStageTokens;
    const int64_t first_page = wave.first / kPageTokenCount;
    const int64_t pages =
        std::min(kStagePages, (n + kPageTokenCount - 1) / kPageTokenCount - first_page);
    for (int h = 0; h < spec().kv_head_count; ++h) {
      SPILLWAY_CUDA_RETURN_IF_ERROR(LaunchStagePages(layer.read_pages(h) + first_page, 0, 1, pages,
                                                     kPageTokenCount * spec().row_bytes(),
                                                     part.stage + h * StageBytes(), stream));
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
    const DenseResult& r = part.results[i];
    item.status.Update(context_->CheckReport(r.report, block.item, block.begin, block.group_index));
    if (!item.status.ok()) continue;
    if (r.error_token != kNoToken) {
      item.status.Update(NonFiniteLogitError(r.error_token, context_->layer(), block.kv_head));
      continue;
    }
    if (part.out == nullptr) continue;
    for (int row = 0; row < block.unit.query_rows; ++row) {
      const int64_t at = (block.begin + row / group) * spec().query_head_count +
                         block.group_index * group + row % group;
      const int64_t from = static_cast<int64_t>(i) * kDenseQueryRows + row;
      std::copy_n(part.out + from * d, d, result.out.data() + at * d);
      result.lse[at] = part.lse[from];
    }
  }
}

}  // namespace spillway::cuda
