#include "gpu/device/sparse_pipeline.h"

#include <algorithm>
#include <bit>
#include <limits>
#include <memory>
#include <numeric>
#include <utility>

#include "gpu/device/wave_kernels.h"
#include "gpu/kernels/methods.h"
#include "host/base/status_macros.h"
#include "host/core/quantiser.h"
#include "host/core/rank_error.h"
#include "host/device/errors.h"
#include "host/device/results.h"

namespace spillway::cuda {
namespace {

// Most bytes of rows that a unit gathers in GPU memory before it folds them. If there are more, the
// rows are read in place.
constexpr int64_t kStagingBytes = int64_t{32} << 20;
constexpr int64_t kStagingRowsMin = 8192;
// In a step whose units would not fit into one wave otherwise.
constexpr int64_t kStagingRowsLeast = 1024;
// Blocks that gather rows. More SMs have more addresses in flight than the GPU can translate; see
// docs/link.md. Where several waves gather at once, fewer reach the link's rate. Rows of 8 bits are
// shorter: two or three waves may have more of them in flight.
constexpr int kGatherBlocks = 8;
constexpr int kLaneGatherBlocks = 4;
constexpr int kLaneGatherBlocksInt8 = 8;
constexpr int kLanesInt8 = 3;
constexpr int64_t kReferencePagesStep = 16;
// From this many units on, two parts of a step at once are faster than all units together. Further
// parts are as large.
constexpr int64_t kLaneUnits = 64;
// Lanes if no row crosses the link.
constexpr int kLinklessLanesMax = 2;
constexpr int64_t kLaneAlignment = 256;

// Tokens for which the grids of a unit of n tokens are made.
int64_t GridTokens(int64_t n) {
  const auto sixteenth = static_cast<int64_t>(std::bit_floor(static_cast<uint64_t>(n)) / 16);
  return RoundUp(n, std::max<int64_t>(kSegmentTokens, sixteenth));
}

// Most tokens in the reference pages of a unit of up to n tokens. A longer unit has fewer pages
// only if they are further apart.
int64_t ReferenceTokensMax(int64_t n) {
  const int64_t pages = (n + kPageTokenCount - 1) / kPageTokenCount;
  constexpr int64_t kAtLeast = 32;  // see ReferencePages
  return std::min(pages, std::max(kAtLeast, pages / 64 + 2)) * kPageTokenCount;
}

}  // namespace

AttendShape SparsePipeline::ShapeOf(const Policy& policy, Selector selector) const {
  AttendShape shape;
  shape.dtype = spec().dtype;
  shape.head_dim = spec().head_dim;
  shape.group = spec().group();
  shape.row_type = spec().row_type;
  shape.row_bytes = spec().row_bytes();
  shape.scale = static_cast<float>(spec().softmax_scale);
  shape.by_mass = policy.heavy_kind == HeavyKind::kMass;
  shape.tiling = context_->model().tiling();
  shape.bits_per_dim = spec().hash.bits_per_dim;
  if (spec().hash.kind == HashKind::kRotation) {
    shape.quantiser_step = QuantiserStep(spec().hash.bits_per_dim);
    shape.quantiser_distortion = QuantiserDistortion(spec().hash.bits_per_dim);
  }
  shape.selector = selector;
  shape.weighed = WeighsValues(selector, spec());
  shape.bin_count = FindSelectorKernels(selector)->bin_count(spec());
  return shape;
}

SparsePipeline::UnitWave SparsePipeline::WaveFor(size_t item) const {
  const AttendQuery& w = context_->attend(item);
  UnitWave wave;
  wave.shape = ShapeOf(w.policy, w.policy.selector);
  if (w.policy.candidate_selector.has_value()) {
    wave.first = ShapeOf(w.policy, *w.policy.candidate_selector);
    wave.first->by_mass = false;
  }
  wave.tail_kernels = FindTailKernels(w.policy.tail);
  wave.select_only = w.select_only;
  return wave;
}

void SparsePipeline::LayOutWave(const Policy& policy, int64_t unit_count, UnitWave& wave,
                                Carver& requests, Carver& results, Carver& workspace) const {
  const int64_t width = int64_t{spec().group()} * spec().head_dim;
  wave.requests = requests.Take<UnitRequest>(unit_count);
  wave.results = results.Take<UnitResult>(unit_count);
  if (context_->step() == nullptr) {
    wave.q = requests.Take<float>(unit_count * width);
    wave.out = results.Take<float>(unit_count * width);
  }
  wave.device_requests = workspace.Take<UnitRequest>(unit_count);
  wave.device_q = workspace.Take<float>(unit_count * width);
  wave.shared.slots = SharedSlots(unit_count);
  wave.shared.keys = workspace.Take<unsigned long long>(wave.shared.slots);
  wave.shared.places = workspace.Take<std::byte*>(wave.shared.slots);
  if (const ModelMethods* methods = context_->model().methods(); methods != nullptr) {
    wave.methods = methods->LayOut(policy, unit_count, requests, workspace);
  }
}

uint32_t SparsePipeline::SharedSlots(int64_t unit_count) const {
  // What a step needs is measured before it is known whether its sequences share rows.
  const bool measures = context_->step() != nullptr && context_->step()->measures;
  return measures || shares_rows_ ? static_cast<uint32_t>(unit_count) * kSharedRowSlots : 0;
}

int64_t SparsePipeline::StagingRows(const AttendShape& shape, int64_t n, int64_t taken) const {
  const int64_t lane_bytes = context_->workspace_bytes() / lanes_max_;
  const int64_t most = std::min(kStagingBytes, lane_bytes / 4) / shape.row_bytes;
  if (context_->step() == nullptr) {
    const int64_t share_bytes = lane_bytes / unit_count_;
    // A quarter of the rows. More if all units of the job still fit into one wave, because waves
    // run one after the other.
    return std::min(
        {n, std::max({n / 4, kStagingRowsMin, share_bytes / 2 / shape.row_bytes}), most});
  }
  // A step keeps its memory, so it takes no more, whether its sequences share rows or not. It takes
  // less, down to a sixteenth of the rows, if then all units fit into one wave.
  const int64_t of_wave = 2 * int64_t{sizeof(UnitRequest)} +
                          2 * int64_t{shape.group} * shape.head_dim * int64_t{sizeof(float)} +
                          int64_t{kSharedRowSlots} * kSharedRowBytes;
  const int64_t units = (unit_count_ + lanes_max_ - 1) / lanes_max_;
  const int64_t room = lane_bytes / units - taken - of_wave - 8 * kLaneAlignment;
  const int64_t fits = room / (shape.row_bytes + int64_t{sizeof(std::byte*)});
  const int64_t wanted = std::max(n / 4, kStagingRowsMin);
  const int64_t least = std::max(n / 16, kStagingRowsLeast);
  return std::min({n, std::clamp(fits, std::min(least, wanted), wanted), most});
}

void SparsePipeline::LayOutUnit(const UnitWave& wave, int64_t i, const Unit& unit, UnitRequest& r,
                                Carver& workspace) const {
  const AttendShape& shape = wave.shape;
  const int group = shape.group;
  const int bins_max = std::max(shape.bin_count, wave.first ? wave.first->bin_count : 0);
  const int64_t n = context_->TokenCapacity(r.n);
  const int64_t segments = (n + kSegmentTokens - 1) / kSegmentTokens;
  const int64_t padded = segments * kSegmentTokens;
  const int64_t before = workspace.bytes();
  r.q = wave.device_q + i * group * shape.head_dim;
  r.bins = workspace.Take<uint16_t>(padded);
  r.histogram = workspace.Take<uint32_t>(bins_max);
  r.class_of_bin = workspace.Take<uint8_t>(bins_max + 2);
  if (shape.by_mass) {
    r.head_bins = workspace.Take<uint16_t>(group * n);
    r.head_histograms = workspace.Take<uint32_t>(int64_t{group} * kScoreBinCount);
    r.head_ties = workspace.Take<uint32_t>((group + 1) * segments);
  }
  const auto is_asymmetric = [](const AttendShape& s) {
    return s.selector == Selector::kAsymmetric;
  };
  if (is_asymmetric(shape) || (wave.first && is_asymmetric(*wave.first))) {
    const int64_t pages = (n + kPageTokenCount - 1) / kPageTokenCount;
    r.centre_logits = workspace.Take<float>(pages * group);
    r.rank_sums = workspace.Take<RankSums<float>>(pages * group);
  }
  const int quartets = (group + 3) / 4;
  r.query_planes =
      workspace.Take<uint32_t>(int64_t{quartets} * 16 * std::max(1, shape.tiling.words));
  r.reference_token_count = ReferencePages::Of(r.begin, r.end).count * kPageTokenCount;
  r.reference_logits = workspace.Take<float>(group * ReferenceTokensMax(n));
  r.filtered = workspace.Take<uint32_t>(padded);
  r.segment_counts = workspace.Take<uint32_t>(segments);
  r.segment_ties = workspace.Take<SegmentTies>(segments);
  r.segment_table = workspace.Take<uint32_t>(segments * kSegmentColumns);
  r.list = workspace.Take<uint32_t>(n);
  r.sources = workspace.Take<const std::byte*>(n);
  if (context_->attend(unit.item).policy.AnswersFromCodes(spec(), Tail::kStratified)) {
    LayOutCodes(shape, n, r, workspace);
  }
  r.partials = workspace.Take<float>(kPhases * kSplitMax * PartialFloats(group, shape.head_dim));
  r.state = workspace.Take<UnitState>(1);
  r.staging_rows = StagingRows(shape, n, workspace.bytes() - before);
  r.staging = workspace.Take<std::byte>(r.staging_rows * shape.row_bytes);
  r.gather = workspace.Take<const std::byte*>(r.staging_rows);
  if (wave.methods.shape == nullptr) return;
  const float* const centre = context_->index(unit.item).centre(KvHeadOf(unit));
  context_->model().methods()->LayOut(wave.methods, context_->attend(unit.item).policy, i,
                                      {context_->layer(), KvHeadOf(unit), centre}, r, workspace);
}

void SparsePipeline::LayOutCodes(const AttendShape& shape, int64_t n, UnitRequest& r,
                                 Carver& workspace) {
  const int group = shape.group;
  const int64_t pages = (n + kPageTokenCount - 1) / kPageTokenCount;
  const int64_t spans = SpanCount(pages);
  r.codes.levels = workspace.Take<uint8_t>(pages * group * kPageTokenCount);
  r.codes.largest = workspace.Take<float>(pages * group);
  r.codes.predicted = workspace.Take<PredictedPart>(spans * kStrataMax * group);
  r.codes.sums =
      workspace.Take<float>(spans * group * SpanFloats(shape.head_dim, shape.tiling.value_parts()));
  r.codes.totals = workspace.Take<std::byte>(group * CodeTotalsBytes(shape.head_dim));
}

UnitRequest SparsePipeline::Request(size_t item, int64_t query) const {
  const AttendQuery& w = context_->attend(item);
  const Policy& p = w.policy;
  UnitRequest r{};
  r.n = w.visible[query];
  r.sink = p.sink_token_count;
  r.begin = r.sink;
  r.end = p.ScoredEnd(spec(), r.n);
  r.window = r.n - r.end;
  r.heavy_count = p.heavy_kind == HeavyKind::kMass ? 0 : p.HeavyCount(r.n);
  r.adaptive_heavy = p.heavy_kind == HeavyKind::kAdaptive;
  r.knows_rank_error = p.KnowsRankError() && p.selector == Selector::kAsymmetric;
  r.heavy_mass = p.heavy_mass;
  r.heavy_floor = p.heavy_floor;
  r.heavy_ceiling = p.heavy_ceiling;
  r.by_mass = p.heavy_kind == HeavyKind::kMass;
  r.signs = ProjectionSigns::Of(p.seed);
  return r;
}

void SparsePipeline::Clear() {
  waves_.clear();
  unit_bytes_max_ = 0;
  append_begins_ = nullptr;
}

void SparsePipeline::Add(size_t item, int64_t query) {
  if (waves_.empty()) ChooseLanes();
  const Policy& policy = context_->attend(item).policy;
  // All units of a query need the same amount of own memory.
  UnitWave alone = WaveFor(item);
  Carver pinned, shared, own;
  LayOutWave(policy, 1, alone, pinned, pinned, shared);
  UnitRequest request = Request(item, query);
  LayOutUnit(alone, 0, {item, query, 0}, request, own);
  const int64_t bytes = shared.bytes() + own.bytes();
  unit_bytes_max_ = std::max(unit_bytes_max_, bytes);

  const ModelMethods* const methods = context_->model().methods();
  const bool whole = methods != nullptr && methods->TakesWholeQueries(policy);
  const int heads = spec().kv_head_count;
  const int groups = spec().group_count();
  // Units of one KV head may share rows. Then lanes have KV heads of their own, if they can.
  const bool by_heads = lanes_ > 1 && !whole && shares_rows_ && heads % lanes_ == 0;
  const auto units_max =
      static_cast<size_t>(lanes_ > 1 && !by_heads ? (unit_count_ + lanes_ - 1) / lanes_
                                                  : std::numeric_limits<int64_t>::max());
  const auto fits = [&](const UnitWave& wave, int units) {
    return wave.units.size() + static_cast<size_t>(units) <= units_max &&
           wave.shape == alone.shape && wave.first == alone.first &&
           wave.tail_kernels == alone.tail_kernels && wave.select_only == alone.select_only &&
           wave.bytes_max + units * bytes <= context_->workspace_bytes() / lanes_;
  };
  for (int g = 0; g < groups; ++g) {
    const bool may_split = !whole || g == 0;
    const int lane = by_heads ? spec().KvHeadOf(g) * lanes_ / heads : -1;
    // The last wave, by heads the last one of the lane.
    const auto last = std::find_if(waves_.rbegin(), waves_.rend(), [&](const UnitWave& wave) {
      return !by_heads || wave.lane == lane;
    });
    const bool new_wave = last == waves_.rend() || (may_split && !fits(*last, whole ? groups : 1));
    if (new_wave) {
      alone.lane = by_heads ? lane : static_cast<int>(waves_.size()) % lanes_;
      waves_.push_back(alone);
      waves_.back().units.reserve(groups);
    }
    UnitWave& wave = new_wave ? waves_.back() : *last;
    wave.units.push_back({item, query, g});
    wave.bytes_max += bytes;
    wave.unit_bytes += own.bytes();
  }
}

void SparsePipeline::ChooseLanes() {
  unit_count_ = context_->unit_count();
  crosses_link_ = MayCrossLink();
  shares_rows_ = crosses_link_ && MayShareRows();
  lanes_max_ = 1;
  if (context_->step() != nullptr && unit_count_ >= kLaneUnits) {
    const int64_t parts = (unit_count_ + kLaneUnits / 2) / kLaneUnits;
    lanes_max_ = static_cast<int>(std::clamp<int64_t>(parts, 2, kStepLanesMax));
  }
  lanes_ = crosses_link_ ? lanes_max_ : std::min(lanes_max_, kLinklessLanesMax);
}

bool SparsePipeline::MayShareRows() const {
  if (context_->step() != nullptr && context_->step()->measures) return false;
  if (spec().groups_per_kv_head() > 1) return true;
  std::vector<const std::byte*> first_pages;
  for (const JobItem& item : context_->job().items) {
    if (!item.attend.has_value()) continue;
    if (item.attend->query_count > 1) return true;
    first_pages.push_back(item.attend->rows->Page(0, 0));
  }
  std::ranges::sort(first_pages);
  return std::ranges::adjacent_find(first_pages) != first_pages.end();
}

bool SparsePipeline::MayCrossLink() const {
  if (context_->step() == nullptr || context_->step()->measures) return true;
  const std::vector<JobItem>& items = context_->job().items;
  for (size_t i = 0; i < items.size(); ++i) {
    if (context_->index(i).whole().end() < items[i].attend->visible.back()) return true;
  }
  return false;
}

std::array<int64_t, kStepLanesMax> SparsePipeline::LaneBytes() const {
  std::array<int64_t, kStepLanesMax> bytes{};
  for (const UnitWave& wave : waves_) {
    bytes[wave.lane] = std::max(bytes[wave.lane], RoundUp(wave.bytes, kLaneAlignment));
  }
  return bytes;
}

int64_t SparsePipeline::Reserve(Carver& requests, Carver& results) {
  for (UnitWave& wave : waves_) {
    Carver workspace;
    LayOutWave(PolicyOf(wave), static_cast<int64_t>(wave.units.size()), wave, requests, results,
               workspace);
    wave.bytes = workspace.bytes() + wave.unit_bytes;
  }
  const std::array<int64_t, kStepLanesMax> lanes = LaneBytes();
  return std::accumulate(lanes.begin(), lanes.end(), int64_t{0});
}

int64_t SparsePipeline::WorkspaceMax() const {
  const int64_t lanes = lanes_max_;
  const int64_t units = (unit_count_ + lanes - 1) / lanes;
  const int64_t of_lane = std::min(units * unit_bytes_max_,
                                   std::max(context_->workspace_bytes() / lanes, unit_bytes_max_));
  return lanes * RoundUp(of_lane, kLaneAlignment);
}

void SparsePipeline::Address(const Unit& unit, UnitRequest& r) const {
  const LayerIndex& index = context_->index(unit.item);
  const int layer = context_->layer();
  const int kv_head = KvHeadOf(unit);
  r.row_pages = index.read_pages(kv_head);
  if (spec().has_index()) r.code_pages = index.code_pages(kv_head);
  r.resident = index.resident(kv_head);
  r.sinks = context_->model().sinks(layer, unit.group_index);
  if (spec().hash.kind == HashKind::kRotation) {
    r.rotation_transposed = context_->model().rotation(layer).transposed;
    r.statistics = index.statistics(kv_head);
  }
  const uint64_t seed = context_->attend(unit.item).policy.seed;
  const uint32_t resident = r.terms.tail == Tail::kNone ? 0 : spec().ResidentSample(seed);
  r.order = MakeSampleOrder(seed, spec().first_layer + layer, spec().first_kv_head + kv_head, r.n,
                            resident);
}

void SparsePipeline::Fill(const UnitWave& wave, Carver& workspace) const {
  const int64_t width = int64_t{spec().group()} * spec().head_dim;
  UnitRequest of_query{};
  TailTerms terms{};
  for (size_t i = 0; i < wave.units.size(); ++i) {
    const Unit& unit = wave.units[i];
    const AttendQuery& w = context_->attend(unit.item);
    // The units of an item follow each other, and so do those of a query.
    const Unit* const before = i > 0 ? &wave.units[i - 1] : nullptr;
    const bool same_item = before != nullptr && before->item == unit.item;
    if (!same_item || before->query != unit.query) of_query = Request(unit.item, unit.query);
    if (!same_item || !w.tails.empty()) {
      terms = TermsOf(w.policy, w.TailOf(KvHeadOf(unit)), /*may_promise=*/false);
    }
    UnitRequest r = of_query;
    r.place = {static_cast<int32_t>(unit.item), static_cast<int16_t>(unit.query),
               static_cast<int16_t>(unit.group_index)};
    r.terms = terms;
    r.terms.may_promise = w.MayPromise(spec(), KvHeadOf(unit), unit.query);
    Address(unit, r);
    r.shared = wave.shared;
    LayOutUnit(wave, static_cast<int64_t>(i), unit, r, workspace);
    if (!w.policy.AnswersFromCodes(spec(), terms.tail)) r.codes = {};
    r.result = wave.results + i;
    r.out = wave.select_only || wave.out == nullptr ? nullptr : wave.out + i * width;
    wave.requests[i] = r;
    // Kernels do not write all of it, and an earlier step may have used its memory for other units.
    r.result->report = {};
    std::ranges::fill(r.result->moments, 0);
    if (wave.q != nullptr) {
      context_->ToFloats(unit.item, unit.query, unit.group_index, wave.q + i * width);
    }
  }
}

void SparsePipeline::Prepare(Carver& requests, Carver& results, std::byte* workspace) {
  const std::array<int64_t, kStepLanesMax> bytes = LaneBytes();
  std::array<int64_t, kStepLanesMax> begins{};
  std::exclusive_scan(bytes.begin(), bytes.end(), begins.begin(), int64_t{0});
  for (UnitWave& wave : waves_) {
    Carver carver(workspace + begins[wave.lane]);
    LayOutWave(PolicyOf(wave), static_cast<int64_t>(wave.units.size()), wave, requests, results,
               carver);
    Fill(wave, carver);
  }
}

absl::Status SparsePipeline::Launch(StepAppend append) {
  append_begins_ = append.begins;
  if (uses_lanes()) return LaunchLanes();
  for (const UnitWave& wave : waves_) {
    RETURN_IF_ERROR(Launch(wave, std::exchange(append, {}), /*scored=*/nullptr));
  }
  return absl::OkStatus();
}

absl::Status SparsePipeline::LaunchLanes() {
  StepContext& step = *context_->step();
  cudaStream_t first = step.stream;
  const auto others = step.lanes.first(std::min<size_t>(waves_.size(), lanes_) - 1);
  // If rows cross the link, a lane begins once the lane before it has scores: while that one
  // gathers rows, this one uses the GPU. Lanes that begin together would gather together, and the
  // link would idle before and after. If no rows cross it, all begin together.
  absl::Status status;
  for (size_t i = 0; i < others.size() && !crosses_link_ && status.ok(); ++i) {
    status = ToStatus(cudaEventRecord(others[i].begins.get(), first), "cudaEventRecord");
  }
  size_t begun = 0;  // lanes, in their order
  for (const UnitWave& wave : waves_) {
    const auto lane = static_cast<size_t>(wave.lane);
    const bool begins = lane == begun;
    if (begins && lane > 0) {
      status = ToStatus(
          cudaStreamWaitEvent(others[lane - 1].stream.get(), others[lane - 1].begins.get()),
          "cudaStreamWaitEvent");
    }
    if (!status.ok()) break;
    if (begins) ++begun;
    step.stream = lane == 0 ? first : others[lane - 1].stream.get();
    const bool begins_next = begins && crosses_link_ && lane < others.size();
    status = Launch(wave, {}, begins_next ? others[lane].begins.get() : nullptr);
    if (!status.ok()) break;
  }
  step.stream = first;
  // Also after an error: the stream waits until what was launched has ended.
  for (const StepLane& lane : others.first(begun > 0 ? begun - 1 : 0)) {
    status.Update(ToStatus(cudaEventRecord(lane.ends.get(), lane.stream.get()), "cudaEventRecord"));
    status.Update(ToStatus(cudaStreamWaitEvent(first, lane.ends.get()), "cudaStreamWaitEvent"));
  }
  return status;
}

std::vector<Wave> SparsePipeline::Views() const {
  std::vector<Wave> views;
  views.reserve(waves_.size());
  for (const UnitWave& wave : waves_) views.push_back(View(wave, {}));
  return views;
}

Wave SparsePipeline::View(const UnitWave& wave, const StepAppend& append) const {
  Wave w;
  w.shape = wave.shape;
  w.first = wave.first;
  w.host_units = context_->Uploaded(wave.requests);
  w.host_q = wave.q;
  w.units = wave.device_requests;
  w.unit_count = static_cast<int>(wave.units.size());
  for (int i = 0; i < w.unit_count; ++i) {
    const UnitRequest& r = wave.requests[i];
    // Rounded up, so that the next step usually has the same wave.
    w.token_count_max = std::max(w.token_count_max, GridTokens(r.n));
    const int64_t reference_pages = r.reference_token_count / kPageTokenCount;
    w.reference_pages_max =
        std::max(w.reference_pages_max, context_->step() != nullptr
                                            ? ReferenceTokensMax(GridTokens(r.n)) / kPageTokenCount
                                            : RoundUp(reference_pages, kReferencePagesStep));
    w.has_tail |= r.terms.tail != Tail::kNone;
    w.has_coded |= r.coded();
    w.has_uncoded |= r.terms.tail != Tail::kNone && !r.coded();
  }
  w.tail_kernels = wave.tail_kernels;
  w.methods = wave.methods;
  w.append = append;
  // Later waves of a lane use the workspace of the wave before.
  w.follows_append = &wave == &*std::ranges::find(waves_, wave.lane, &UnitWave::lane);
  if (context_->step() != nullptr) w.step = context_->step()->tensors;
  w.sm_count = context_->gpu().sm_count;
  w.block_shared_bytes = context_->gpu().block_shared_bytes;
  w.bulk_copies = w.overlap = context_->gpu().hopper;
  w.gathers_apart = uses_lanes() && crosses_link_;
  const bool more_in_flight = spec().row_type == RowType::kInt8 && lanes_ <= kLanesInt8;
  w.gather_blocks = !w.gathers_apart ? kGatherBlocks
                    : more_in_flight ? kLaneGatherBlocksInt8
                                     : kLaneGatherBlocks;
  return w;
}

absl::Status SparsePipeline::Launch(const UnitWave& wave, const StepAppend& append,
                                    cudaEvent_t scored) {
  const Wave w = View(wave, append);
  cudaStream_t stream = context_->stream();
  if (w.methods.shape != nullptr) {
    SPILLWAY_CUDA_RETURN_IF_ERROR(context_->model().methods()->LaunchAhead(
        w.methods, PolicyOf(wave), context_->layer(), wave.q, w.unit_count, stream));
    // Not a node of the graph: as a node, the copy failed with cudaErrorLaunchFailure, although no
    // kernel was at fault (H200, driver 580.159).
    if (w.methods.request_bytes > 0) {
      SPILLWAY_CUDA_RETURN_IF_ERROR(cudaMemcpyAsync(w.methods.units, w.methods.host_units,
                                                    static_cast<size_t>(w.methods.request_bytes),
                                                    cudaMemcpyHostToDevice, stream));
    }
  }
  if (context_->step() != nullptr) return LaunchWave(w, *context_, scored);
  // With a trace, no graph: the events between the kernels belong to one job.
  RETURN_IF_ERROR(context_->job().trace ? LaunchWave(w, *context_)
                                        : context_->slot().graphs().Run(
                                              w, stream, [&] { return LaunchWave(w, *context_); }));
  return wave.select_only ? CollectSelections(wave) : absl::OkStatus();
}

absl::Status SparsePipeline::CollectSelections(const UnitWave& wave) const {
  cudaStream_t stream = context_->stream();
  SPILLWAY_CUDA_RETURN_IF_ERROR(cudaStreamSynchronize(stream));
  auto state = std::make_unique<UnitState>();
  std::vector<uint32_t> list;
  for (size_t i = 0; i < wave.units.size(); ++i) {
    const Unit& unit = wave.units[i];
    const UnitRequest& r = wave.requests[i];
    SPILLWAY_CUDA_RETURN_IF_ERROR(
        cudaMemcpyAsync(state.get(), r.state, sizeof(UnitState), cudaMemcpyDeviceToHost, stream));
    SPILLWAY_CUDA_RETURN_IF_ERROR(cudaStreamSynchronize(stream));
    list.resize(static_cast<size_t>(state->list_count));
    SPILLWAY_CUDA_RETURN_IF_ERROR(cudaMemcpyAsync(
        list.data(), r.list, sizeof(uint32_t) * list.size(), cudaMemcpyDeviceToHost, stream));
    SPILLWAY_CUDA_RETURN_IF_ERROR(cudaStreamSynchronize(stream));

    SelectionBuilder rows;
    for (int64_t j = 0; j < state->exact_count; ++j) {
      rows.Add(list[j], j < r.sink                           ? kStratumSink
                        : j >= state->exact_count - r.window ? kStratumWindow
                                                             : kStratumHeavy);
    }
    int64_t at = state->exact_count;
    for (int phase = 0; phase < kPhases; ++phase) {
      for (int h = 0; h < state->strata; ++h) {
        const int64_t count = state->stratum_drawn[phase][h];
        rows.AddSampled({list.data() + at, static_cast<size_t>(count)}, h, state->drawn[h],
                        state->stratum_count[h]);
        at += count;
      }
    }
    context_->item(unit.item)
        .result.selections[unit.query * spec().group_count() + unit.group_index] = rows.Build();
  }
  return absl::OkStatus();
}

void SparsePipeline::Collect(const UnitWave& wave) const {
  const int groups = spec().group_count();
  const int group = spec().group();
  const int d = spec().head_dim;
  for (size_t i = 0; i < wave.units.size(); ++i) {
    const auto [index, query, group_index] = wave.units[i];
    JobItem& item = context_->item(index);
    AttendResult& result = item.result;
    const UnitResult& r = wave.results[i];
    item.status.Update(context_->CheckReport(r.report, index, query, group_index));
    if (!item.status.ok()) continue;
    if (r.error_token != kNoToken) {
      item.status.Update(
          NonFiniteLogitError(r.error_token, context_->layer(), KvHeadOf(wave.units[i])));
      continue;
    }
    result.moved_row_count += r.moved_count;
    result.touched_row_counts[query * groups + group_index] = r.touched_count;
    for (int g = 0; g < group; ++g) {
      const int64_t at = query * spec().query_head_count + group_index * group + g;
      Certificate& c = result.certificates[at];
      c.visible_token_count = item.attend->visible[query];
      c.heavy_token_count = r.heavy_count;
      c.sampled_token_count = r.sampled_count;
      c.relative_error = r.certificates[g].relative_error;
      c.tail_mass = r.certificates[g].tail_mass;
      c.promise = r.certificates[g].promise;
      // Attention to a selection does not have the codes' part of the answer.
      if (wave.select_only && wave.requests[i].coded() && c.promise != Promise::kExact) {
        c.promise = Promise::kNone;
        c.relative_error = std::numeric_limits<float>::infinity();
      }
      if (item.attend->select_only || wave.out == nullptr) continue;
      std::copy_n(wave.out + (static_cast<int64_t>(i) * group + g) * d, d,
                  result.out.data() + at * d);
      result.lse[at] = r.lse[g];
    }
  }
}

void SparsePipeline::Collect() const {
  const uint64_t* append_begins = append_begins_;
  for (const UnitWave& wave : waves_) {
    Collect(wave);
    uint64_t ends = 0;
    for (size_t i = 0; i < wave.units.size(); ++i) {
      ends = std::max(ends, wave.results[i].moments[kUnitEnds]);
    }
    context_->stages().AddWave(wave.results[0], ends,
                               append_begins != nullptr ? *append_begins : 0);
    append_begins = nullptr;
  }
}

}  // namespace spillway::cuda
