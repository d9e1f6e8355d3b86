// What of a job goes through the kernels together, and the memory of it.
#include "gpu/device/job_run.h"

#include <algorithm>
#include <memory>
#include <utility>

#include "absl/strings/ascii.h"
#include "absl/strings/str_cat.h"
#include "gpu/kernels/methods.h"
#include "host/base/elements.h"
#include "host/core/quantiser.h"
#include "host/device/results.h"
#include "host/policy/methods.h"

namespace spillway::cuda {
namespace {

// Rows that a unit gathers to GPU memory before it folds them; more are read
// where they lie.
constexpr int64_t kStagingBytes = int64_t{32} << 20;
constexpr int64_t kDenseSplitRowsMin = 256;
constexpr int64_t kDenseSplitsWanted = 256;
constexpr int64_t kPartialBytes = int64_t{256} << 20;

}  // namespace

JobRun::JobRun(Job* job, StreamSlot* slot, const Gpu& gpu) : job_(job), slot_(slot), gpu_(gpu) {}

LayerIndex& JobRun::index(size_t item) const {
  return static_cast<CudaSequence&>(*job_->items[item].sequence).layers[job_->layer];
}

void JobRun::AddDense(const DenseRun& run) {
  const AttendQuery& w = attend(run.item);
  AttendResult& result = job_->items[run.item].result;
  FillDenseResult(spec(), w, run.begin, run.end, result);
  if (w.select_only) return;
  const int group = spec().group();
  const int64_t queries = std::max<int64_t>(1, kDenseQueryRows / group);
  const bool staged = run.end - run.begin > queries;
  for (int64_t t = run.begin; t < run.end; t += queries) {
    const int64_t end = std::min(t + queries, run.end);
    const int64_t n = *std::max_element(w.visible.begin() + t, w.visible.begin() + end);
    const int64_t split_rows =
        staged ? kStagedSplitRows
               : std::max(kDenseSplitRowsMin,
                          RoundUp((n + kDenseSplitsWanted - 1) / kDenseSplitsWanted, 32));
    const int64_t splits = (n + split_rows - 1) / split_rows;
    const int64_t bytes =
        splits * kDenseQueryRows * (2 + spec().head_dim) * 4 * int64_t{spec().kv_head_count};
    // Runs that read their rows in place share parts; one that stages them has
    // parts of its own, each of which brings the rows over anew.
    const bool fits =
        !dense_.empty() && dense_.back().staged == staged && (!staged || t > run.begin) &&
        dense_.back().partial_bytes + bytes <= std::min(kPartialBytes, slot_->wave_bytes());
    if (!fits) dense_.emplace_back().staged = staged;
    if (!fits || !staged) result.moved_row_count += n * spec().kv_head_count;
    dense_.back().partial_bytes += bytes;
    for (int h = 0; h < spec().kv_head_count; ++h) {
      DenseBlock& block = dense_.back().blocks.emplace_back();
      block.item = run.item;
      block.begin = t;
      block.end = end;
      block.kv_head = h;
      block.unit.query_rows = static_cast<int32_t>((end - t) * group);
      block.unit.n = n;
      block.unit.split_rows = split_rows;
      block.unit.split_count = splits;
      for (int r = 0; r < block.unit.query_rows; ++r) {
        block.unit.visible[r] = w.visible[t + r / group];
      }
    }
  }
}

absl::Status JobRun::CheckServed(const Policy& policy) const {
  const auto missing = [&](std::string_view kind, std::string_view name) {
    return absl::UnimplementedError(
        absl::StrCat(std::string(kind), absl::AsciiStrToUpper(std::string(name)),
                     " is not implemented on ", std::string(gpu_.name)));
  };
  const auto scored = [](Selector selector) {
    return selector == Selector::kAll || FindSelectorKernels(selector) != nullptr;
  };
  if (!scored(policy.selector)) return missing("SELECTOR_", MethodOf(policy.selector).name);
  if (const std::optional<Selector> first = policy.candidate_selector) {
    if (!scored(*first)) return missing("SELECTOR_", MethodOf(*first).name);
    if (BuiltMethods().first_selection == nullptr) return missing("", "candidates");
  }
  if (!IsSampled(policy.tail)) return missing("TAIL_", MethodOf(policy.tail).name);
  return absl::OkStatus();
}

void JobRun::Split() {
  for (size_t i = 0; i < job_->items.size(); ++i) {
    JobItem& item = job_->items[i];
    if (!item.attend.has_value() || !item.status.ok()) continue;
    item.status = CheckServed(item.attend->policy);
    if (!item.status.ok()) continue;
    item.result = AllocateResult(spec(), *item.attend);
    CutQueries(
        *item.attend, job_->layer,
        [&](int64_t begin, int64_t end) {
          AddDense({i, begin, end});
        },
        [&](int64_t t) { AddSparse(i, t); });
  }
}

void JobRun::AddSparse(size_t item, int64_t query) {
  const AttendQuery& w = attend(item);
  SparseWave alone;
  alone.units = {{item, query, 0}};
  Carver pinned, workspace;
  LayOut(alone, pinned, workspace, /*fill=*/false);
  const bool by_mass = w.policy.heavy_kind == HeavyKind::kMass;
  const bool whole = model().methods() != nullptr && model().methods()->TakesWholeQueries(w.policy);
  const TailKernels* const tail = FindTailKernels(w.policy.tail);
  const auto fits = [&](const SparseWave& wave, int units) {
    const AttendQuery& other = attend(wave.units.front().item);
    return other.policy.selector == w.policy.selector &&
           other.policy.candidate_selector == w.policy.candidate_selector &&
           FindTailKernels(other.policy.tail) == tail && other.select_only == w.select_only &&
           (other.policy.heavy_kind == HeavyKind::kMass) == by_mass &&
           wave.workspace_bytes + units * workspace.bytes() <= slot_->wave_bytes();
  };
  for (int h = 0; h < spec().kv_head_count; ++h) {
    const int units = whole ? spec().kv_head_count : 1;
    if (waves_.empty() || ((!whole || h == 0) && !fits(waves_.back(), units))) {
      waves_.emplace_back().select_only = w.select_only;
    }
    waves_.back().units.push_back({item, query, h});
    waves_.back().workspace_bytes += workspace.bytes();
  }
}

void JobRun::ToFloats(size_t item, int64_t query, int kv_head, float* q) const {
  const AttendQuery& w = attend(item);
  const int64_t width = int64_t{spec().group()} * spec().head_dim;
  const int64_t at = query * spec().query_head_count * spec().head_dim + kv_head * width;
  ToFloat(w.q_dtype, w.q + at * DTypeBytes(w.q_dtype), width, q);
}

UnitRequest JobRun::Request(size_t item, int64_t query) const {
  const AttendQuery& w = attend(item);
  const Policy& p = w.policy;
  UnitRequest r{};
  r.n = w.visible[query];
  r.sink = p.sink_token_count;
  r.window = p.window_token_count;
  r.begin = r.sink;
  r.end = r.n - r.window;
  r.heavy_count = p.heavy_kind == HeavyKind::kMass ? 0 : p.HeavyCount(r.n);
  r.heavy_mass = p.heavy_mass;
  r.heavy_floor = p.heavy_floor;
  r.heavy_ceiling = p.heavy_ceiling;
  r.by_mass = p.heavy_kind == HeavyKind::kMass;
  r.terms = TermsOf(p, p, /*may_promise=*/false);
  return r;
}

void JobRun::Address(const SparseUnit& unit, UnitRequest& r) const {
  const LayerIndex& layer = index(unit.item);
  r.row_pages = layer.row_pages(unit.kv_head);
  if (spec().has_index()) r.code_pages = layer.code_pages(unit.kv_head);
  r.resident = layer.resident(unit.kv_head);
  if (spec().hash.kind == HashKind::kRotation) {
    r.rotation_transposed = model().rotation(job_->layer).transposed;
  }
  const uint64_t seed = attend(unit.item).policy.seed;
  const uint32_t band = r.terms.tail == Tail::kNone ? 0 : spec().SampleBand(seed);
  r.order = MakeSampleOrder(seed, job_->layer, unit.kv_head, r.n, band);
}

AttendShape JobRun::Shape(const SparseWave& wave) const {
  const Policy& p = attend(wave.units.front().item).policy;
  AttendShape shape;
  shape.dtype = spec().dtype;
  shape.head_dim = spec().head_dim;
  shape.group = spec().group();
  shape.row_bytes = spec().row_bytes();
  shape.scale = static_cast<float>(spec().softmax_scale);
  shape.by_mass = p.heavy_kind == HeavyKind::kMass;
  shape.tiling = model().tiling();
  shape.bits_per_dim = spec().hash.bits_per_dim;
  if (spec().hash.kind == HashKind::kRotation) {
    shape.quantiser_step = QuantiserStep(spec().hash.bits_per_dim);
  }
  SetSelector(p.selector, shape);
  return shape;
}

void JobRun::SetSelector(Selector selector, AttendShape& shape) const {
  shape.selector = selector;
  shape.bin_count = FindSelectorKernels(selector)->bin_count(spec());
}

std::optional<AttendShape> JobRun::FirstShape(const SparseWave& wave) const {
  const Policy& p = attend(wave.units.front().item).policy;
  if (!p.candidate_selector.has_value()) return std::nullopt;
  AttendShape shape = Shape(wave);
  shape.by_mass = false;
  SetSelector(*p.candidate_selector, shape);
  return shape;
}

void JobRun::LayOut(SparseWave& wave, Carver& pinned, Carver& workspace, bool fill) {
  const int group = spec().group();
  const int d = spec().head_dim;
  const auto units = static_cast<int64_t>(wave.units.size());
  wave.requests = pinned.Take<UnitRequest>(units);
  wave.q = pinned.Take<float>(units * group * d);
  wave.results = pinned.Take<UnitResult>(units);
  wave.out = pinned.Take<float>(units * group * d);
  device_requests_ = workspace.Take<UnitRequest>(units);
  auto* const device_q = workspace.Take<float>(units * group * d);
  const Policy& policy = attend(wave.units.front().item).policy;
  const ModelMethods* const methods = model().methods();
  if (methods != nullptr) wave.methods = methods->LayOut(policy, units, pinned, workspace);

  const AttendShape shape = Shape(wave);
  const std::optional<AttendShape> first = FirstShape(wave);
  const int bins_max = std::max(shape.bin_count, first ? first->bin_count : 0);
  UnitRequest shared{};
  for (int64_t i = 0; i < units; ++i) {
    const SparseUnit& unit = wave.units[i];
    // A query's units follow each other.
    if (i == 0 || unit.item != wave.units[i - 1].item || unit.query != wave.units[i - 1].query) {
      shared = Request(unit.item, unit.query);
    }
    UnitRequest r = shared;
    if (const AttendQuery& w = attend(unit.item); !w.tails.empty()) {
      r.terms = TermsOf(w.policy, w.TailOf(unit.kv_head), /*may_promise=*/false);
    }
    r.terms.may_promise = attend(unit.item).MayPromise(spec(), unit.kv_head, unit.query);
    if (fill) Address(unit, r);
    const int64_t padded = r.chunks() * kChunkTokens;
    r.q = device_q + i * group * d;
    r.bins = workspace.Take<uint16_t>(padded);
    r.histogram = workspace.Take<uint32_t>(bins_max);
    r.class_of_bin = workspace.Take<uint8_t>(bins_max + 2);
    r.limit_of_bin = workspace.Take<uint16_t>(bins_max + 2);
    if (shape.by_mass) {
      r.head_bins = workspace.Take<uint16_t>(group * r.n);
      r.head_histograms = workspace.Take<uint32_t>(int64_t{group} * kScoreBinCount);
      r.head_ties = workspace.Take<uint32_t>(group * r.chunks());
    }
    const int tiles = (group + 3) / 4;
    r.query_planes =
        workspace.Take<uint32_t>(int64_t{tiles} * 16 * std::max(1, shape.tiling.words));
    r.sample_token_count = ReferencePages::Of(r.begin, r.end).count * kPageTokenCount;
    r.sample_logits = workspace.Take<float>(group * r.sample_token_count);
    r.candidates = workspace.Take<uint32_t>(padded);
    r.chunk_counts = workspace.Take<uint32_t>(r.chunks());
    r.chunk_ties = workspace.Take<ChunkTies>(r.chunks());
    r.chunk_table = workspace.Take<uint32_t>(r.chunks() * kChunkColumns);
    r.list = workspace.Take<uint32_t>(r.n);
    r.sources = workspace.Take<const std::byte*>(r.n);
    r.staging_rows =
        std::min(r.n, std::min(kStagingBytes, slot_->wave_bytes() / 4) / shape.row_bytes);
    r.staging = workspace.Take<std::byte>(r.staging_rows * shape.row_bytes);
    r.gather = workspace.Take<const std::byte*>(r.staging_rows);
    r.partials = workspace.Take<float>(2 * kSplitMax * PartialFloats(group, d));
    r.state = workspace.Take<UnitState>(1);
    if (wave.methods.shape != nullptr) {
      const LayerIndex& layer = index(unit.item);
      const float* const centre =
          layer.centred() ? layer.centre() + unit.kv_head * spec().head_dim : nullptr;
      methods->LayOut(wave.methods, attend(unit.item).policy, i,
                      {job_->layer, unit.kv_head, centre}, r, workspace);
    }
    if (!fill) continue;
    r.result = wave.results + i;
    r.out = wave.select_only ? nullptr : wave.out + i * group * d;
    wave.requests[i] = r;
    ToFloats(unit.item, unit.query, unit.kv_head, wave.q + i * group * d);
  }
}

void JobRun::LayOut(DensePart& part, Carver& pinned, Carver& workspace, bool fill) {
  const int d = spec().head_dim;
  const auto count = static_cast<int64_t>(part.blocks.size());
  const int64_t before = pinned.bytes();
  part.units = pinned.Take<DenseUnit>(count);
  part.q = pinned.Take<float>(count * kDenseQueryRows * d);
  if (part.staged) {
    stage_table_pinned_ = pinned.Take<const std::byte*>(spec().kv_head_count * kStagePages);
  }
  request_bytes_ = pinned.bytes() - before;
  part.out = pinned.Take<float>(count * kDenseQueryRows * d);
  part.lse = pinned.Take<float>(count * kDenseQueryRows);
  part.errors = pinned.Take<uint32_t>(count);

  auto* const device_units = workspace.Take<DenseUnit>(count);
  auto* const device_q = workspace.Take<float>(count * kDenseQueryRows * d);
  device_units_ = device_units;
  if (part.staged) {
    stage_table_ = workspace.Take<const std::byte*>(spec().kv_head_count * kStagePages);
    stage_ = workspace.Take<std::byte>(spec().kv_head_count * kStagePages * kPageTokenCount *
                                       spec().row_bytes());
  }
  auto* const errors = workspace.Take<uint32_t>(count);
  for (int64_t i = 0; i < count; ++i) {
    DenseBlock& block = part.blocks[i];
    DenseUnit& unit = block.unit;
    unit.partials =
        workspace.Take<float>(unit.split_count * unit.query_rows * (2 + spec().head_dim));
    if (!fill) continue;
    unit.q = device_q + i * kDenseQueryRows * d;
    unit.row_pages = part.staged ? stage_table_ + block.kv_head * kStagePages
                                 : index(block.item).row_pages(block.kv_head);
    unit.error_token = errors + i;
    unit.out = part.out + i * kDenseQueryRows * d;
    unit.lse = part.lse + i * kDenseQueryRows;
    unit.result_error = part.errors + i;
    part.units[i] = unit;
    for (int64_t t = block.begin; t < block.end; ++t) {
      ToFloats(block.item, t, block.kv_head,
               part.q + (i * kDenseQueryRows + (t - block.begin) * spec().group()) * d);
    }
  }
  if (!fill || !part.staged) return;
  for (int64_t p = 0; p < spec().kv_head_count * kStagePages; ++p) {
    stage_table_pinned_[p] = stage_ + p * kPageTokenCount * spec().row_bytes();
  }
}

absl::Status JobRun::Reserve() {
  // Pinned memory of all, and the largest workspace: parts follow each other.
  Carver pinned;
  int64_t workspace_bytes = 0;
  const auto measure = [&](auto& parts) {
    for (auto& part : parts) {
      Carver workspace;
      LayOut(part, pinned, workspace, /*fill=*/false);
      workspace_bytes = std::max(workspace_bytes, workspace.bytes());
    }
  };
  measure(waves_);
  measure(dense_);
  if (pinned.bytes() == 0) return absl::OkStatus();
  absl::StatusOr<std::byte*> memory = slot_->Pinned(pinned.bytes());
  if (!memory.ok()) return memory.status();
  pinned_ = *memory;
  memory = slot_->Workspace(workspace_bytes);
  if (!memory.ok()) return memory.status();
  workspace_ = *memory;
  return absl::OkStatus();
}

absl::Status JobRun::EnqueueAttends() {
  Carver pinned(pinned_);
  const auto launch = [&](auto& parts) {
    absl::Status status = absl::OkStatus();
    for (auto part = parts.begin(); part != parts.end() && status.ok(); ++part) {
      Carver workspace(workspace_);
      LayOut(*part, pinned, workspace, /*fill=*/true);
      status = Launch(*part);
    }
    return status;
  };
  if (absl::Status status = launch(waves_); !status.ok()) return status;
  return launch(dense_);
}

absl::Status JobRun::Enqueue() {
  Split();
  if (absl::Status status = Reserve(); !status.ok()) return status;
  SPILLWAY_CUDA_RETURN_IF_ERROR(cudaEventRecord(slot_->start(), slot_->stream()));
  absl::Status status = EnqueueAppends();
  if (status.ok()) status = EnqueueAttends();
  if (!status.ok()) {
    for (size_t i = 0; i < job_->items.size(); ++i) index(i).ForgetTables();
    return status;
  }
  return ToStatus(cudaEventRecord(slot_->done(), slot_->stream()), "cudaEventRecord");
}

}  // namespace spillway::cuda
