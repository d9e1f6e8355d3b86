#include "gpu/device/step_planner.h"

#include <algorithm>
#include <iterator>
#include <string>

#include "absl/strings/str_cat.h"
#include "gpu/device/carver.h"
#include "gpu/device/wave_kernels.h"
#include "gpu/kernels/dense.h"
#include "host/base/status_macros.h"
#include "host/device/results.h"
#include "host/memory/layer_record.h"
#include "host/policy/dense_choice.h"

namespace spillway::cuda {

absl::Status StepPlanner::Check() const {
  if (home_.model->methods_encode()) {
    return absl::UnimplementedError(
        absl::StrCat("steps on a stream of ", std::string(home_.gpu.name),
                     ": not for models with this kind of hash weights"));
  }
  for (const StreamStepPart& part : options_.parts) {
    const Policy& policy = part.policy;
    RETURN_IF_ERROR(CheckServed(policy, home_.gpu.name));
    const bool of_core = policy.selector == Selector::kAll ||
                         policy.selector == Selector::kOracle ||
                         policy.selector == Selector::kAsymmetric;
    if (!of_core || policy.candidate_selector.has_value() || !IsPlanned(policy.tail)) {
      return absl::UnimplementedError(
          absl::StrCat("steps on a stream of ", std::string(home_.gpu.name),
                       " serve the selectors all, asymmetric and oracle, without a first "
                       "selection, and the tails none, uniform and stratified"));
    }
  }
  return absl::OkStatus();
}

PlanBytes StepPlanner::MeasureLayers(bool dense) {
  StepContext step;
  step.token_count_max = options_.token_count_max;
  step.workspace_bytes = home_.workspace_bytes;
  step.measures = true;
  const std::vector<int64_t> lengths(options_.parts.size(), options_.token_count_max);
  const bool alike = std::ranges::all_of(
      options_.parts, [](const StreamStepPart& part) { return part.policy.dense_layers.empty(); });
  PlanBytes most;
  for (int layer = 0; layer < spec().layer_count; ++layer) {
    LayerRun run(home_.gpu, step);
    PlanLayer(layer, lengths, step, std::vector<bool>(lengths.size(), dense), run);
    Carver requests, results;
    run.sparse.Reserve(requests, results);
    sparse_bytes_ = std::max(sparse_bytes_, run.sparse.WorkspaceMax());
    dense_bytes_ = std::max(dense_bytes_, run.dense.Reserve(requests, results));
    most.requests = std::max(most.requests, requests.bytes());
    most.results = std::max(most.results, results.bytes());
    // Otherwise layers differ: the policy makes some of them dense.
    if (alike) break;
  }
  return most;
}

PlanBytes StepPlanner::Measure() {
  // A layer may be dense or sparse, depending on the length of its sequences and on what is in GPU
  // memory.
  const PlanBytes sparse = MeasureLayers(/*dense=*/false);
  const PlanBytes dense = MeasureLayers(/*dense=*/true);
  Carver requests;
  requests.Take<std::byte>(sparse.requests);
  requests.Take<std::byte>(dense.requests);
  requests.Take<RowTarget>(item_count() * options_.token_count * spec().kv_head_count);
  requests.Take<StepEncode>(item_count());
  requests.Take<StepLength>(item_count());
  bytes_.requests = requests.bytes();
  bytes_.results = RoundUp(sparse.results, 256) + RoundUp(dense.results, 256);
  bytes_.workspace = runs_beside() ? RoundUp(sparse_bytes_, 256) + dense_bytes_
                                   : std::max(sparse_bytes_, dense_bytes_);
  return bytes_;
}

std::vector<std::unique_ptr<LayerRun>> StepPlanner::MakeRuns() const {
  std::vector<std::unique_ptr<LayerRun>> runs;
  for (int layer = 0; layer < spec().layer_count; ++layer) {
    runs.push_back(std::make_unique<LayerRun>(home_.gpu, StepContext()));
  }
  return runs;
}

std::vector<bool> StepPlanner::FasterDense(int layer, const std::vector<int64_t>& lengths) const {
  if (home_.reproducible) return std::vector<bool>(lengths.size(), false);
  std::vector<DenseCandidate> candidates;
  for (size_t i = 0; i < lengths.size(); ++i) {
    const StreamStepPart& part = options_.parts[i];
    DenseCandidate& candidate = candidates.emplace_back();
    candidate.token_count = lengths[i];
    // Without a tail, the caller asks for the rows that a selector finds.
    candidate.may_be_dense =
        part.policy.tail != Tail::kNone && index(part, layer).whole().end() >= lengths[i];
    candidate.is_dense = part.policy.IsDense(spec(), layer, options_.token_count, lengths[i]);
  }
  const int64_t code_bytes = CudaModel::IndexPageBytes(spec()) / kPageTokenCount;
  return ChooseDense(spec(), {home_.gpu.memory_bytes_per_us, home_.gpu.sm_count, kDenseQueryRows},
                     code_bytes, options_.token_count, candidates);
}

absl::Status StepPlanner::CheckLengths() const {
  for (size_t i = 0; i < options_.parts.size(); ++i) {
    const StreamStepPart& part = options_.parts[i];
    const int64_t start = part.rows->front().token_count();
    const int64_t end = start + options_.token_count;
    if (end > options_.token_count_max) {
      return absl::OutOfRangeError(absl::StrCat("parts[", i, "]: ", end,
                                                " tokens are beyond token_count_max ",
                                                options_.token_count_max, " of the step"));
    }
    // The step that completes the first pages has no index yet, so it must be dense.
    if (!spec().has_index() || start >= kCentreTokenCount || end < kCentreTokenCount) continue;
    for (int layer = 0; layer < spec().layer_count; ++layer) {
      if (part.policy.IsDense(spec(), layer, options_.token_count, end)) continue;
      return absl::UnimplementedError(
          absl::StrCat("parts[", i, "]: the step to ", kCentreTokenCount,
                       " tokens is sparse by its policy: "
                       "append them by a request, or let dense_token_count be at least ",
                       kCentreTokenCount + kSparseQueryCountMax));
    }
  }
  return absl::OkStatus();
}

bool StepPlanner::Lacks(const StreamStepPart& part, int layer) const {
  const int64_t token_count = (*part.rows)[layer].token_count();
  const LayerIndex& of_layer = index(part, layer);
  return (spec().has_index() && token_count >= kCentreTokenCount &&
          of_layer.indexed_token_count() == 0) ||
         of_layer.whole().LacksRows(token_count);
}

void StepPlanner::PlanLayer(int layer, const std::vector<int64_t>& lengths, const StepContext& step,
                            const std::vector<bool>& dense, LayerRun& run) const {
  run.step = step;
  run.context.ClearTimes();
  run.sparse.Clear();
  run.dense.Clear();
  Job& job = run.job;
  const int64_t count = options_.token_count;
  if (job.items.empty()) {
    job.model = home_.model;
    job.layer = layer;
    job.items.resize(options_.parts.size());
    for (size_t i = 0; i < job.items.size(); ++i) {
      const StreamStepPart& part = options_.parts[i];
      JobItem& item = job.items[i];
      item.sequence = part.sequence;
      item.append.emplace();
      item.append->rows = &(*part.rows)[layer];
      item.append->count = count;
      AttendQuery& attend = item.attend.emplace();
      attend.rows = item.append->rows;
      attend.policy = part.policy;
      attend.query_count = count;
      attend.visible.resize(static_cast<size_t>(count));
    }
  }
  for (size_t i = 0; i < job.items.size(); ++i) {
    JobItem& item = job.items[i];
    item.status = absl::OkStatus();
    item.append->start = lengths[i] - count;
    item.attend->policy.selector = dense[i] ? Selector::kAll : options_.parts[i].policy.selector;
    for (int64_t t = 0; t < count; ++t) item.attend->visible[t] = lengths[i] - count + t + 1;
  }
  // The lanes of all depend on the lengths of all.
  for (size_t i = 0; i < job.items.size(); ++i) {
    JobItem& item = job.items[i];
    item.result.certificates.assign(static_cast<size_t>(count * spec().query_head_count), {});
    item.result.touched_row_counts.assign(static_cast<size_t>(count * spec().group_count()), 0);
    item.result.moved_row_count = 0;
    CutQueries(
        spec(), *item.attend, layer,
        [&](int64_t begin, int64_t end) { run.dense.Add(i, begin, end); },
        [&](int64_t query) { run.sparse.Add(i, query); });
  }
}

absl::Status StepPlanner::CheckFits(LayerRun& run, int64_t request_bytes) const {
  Carver requests, results;
  requests.Take<std::byte>(request_bytes);
  const int64_t sparse_bytes = run.sparse.Reserve(requests, results);
  const int64_t dense_bytes = run.dense.Reserve(requests, results);
  if (requests.bytes() <= bytes_.requests && results.bytes() <= bytes_.results &&
      sparse_bytes <= sparse_bytes_ && dense_bytes <= dense_bytes_) {
    return absl::OkStatus();
  }
  return absl::InternalError("a layer of a step takes more than was measured");
}

absl::Status StepPlanner::WriteAppend(LayerRun& run, std::vector<TableUpdate>& updates) const {
  const int64_t count = options_.token_count;
  const int heads = spec().kv_head_count;
  for (size_t i = 0; i < run.job.items.size(); ++i) {
    const AppendWork& append = *run.job.items[i].append;
    const LayerRows& rows = *append.rows;
    LayerIndex& index = run.context.index(i);
    RETURN_IF_ERROR(index.Update(rows, append.start + count, updates));
    static_assert(sizeof(*StepLength::word) == sizeof(*rows.length_word()));
    run.lengths[i] = {reinterpret_cast<unsigned long long*>(rows.length_word()),
                      LayerRecord::LengthWord(append.start),
                      LayerRecord::LengthWord(append.start + count)};
    RowTarget* const targets = run.targets + static_cast<int64_t>(i) * count * heads;
    for (int64_t t = 0; t < count; ++t) {
      for (int h = 0; h < heads; ++h) {
        RowTarget& target = targets[t * heads + h] = {};
        target.row = const_cast<std::byte*>(rows.Row(h, append.start + t));
        target.whole = index.whole().Row(h, append.start + t);
      }
    }
    index.whole().SetFilled(append.start + count);
    StepEncode& encode = run.encodes[i];
    encode = {};
    if (!spec().has_index() || index.indexed_token_count() == 0) continue;
    if (home_.model->has_rotation()) {
      encode.work = index.Work(index.coded_page_count() * kPageTokenCount,
                               ClosedPages(append.start + count) * kPageTokenCount);
      encode.heads = index.heads();
    }
    index.FillResident(append.start + count,
                       [&](int kv_head, int64_t token, std::byte* to, bool recent) {
                         RowTarget& target = targets[(token - append.start) * heads + kv_head];
                         (recent ? target.recent : target.resident) = to;
                       });
    index.SetIndexed(append.start + count);
  }
  return absl::OkStatus();
}

absl::Status StepPlanner::Write(LayerRun& run, std::byte* workspace, const PlannedLayers& layers,
                                Written& written) const {
  const int layer = run.job.layer;
  Carver requests(layers.requests + layer * bytes_.requests);
  Carver results(layers.results + layer * bytes_.results);
  run.targets =
      requests.Take<RowTarget>(item_count() * options_.token_count * spec().kv_head_count);
  run.encodes = requests.Take<StepEncode>(item_count());
  run.lengths = requests.Take<StepLength>(item_count());
  RETURN_IF_ERROR(CheckFits(run, requests.bytes()));
  RETURN_IF_ERROR(WriteAppend(run, written.updates));
  run.sparse.Prepare(requests, results, workspace);
  run.dense.Prepare(requests, results,
                    runs_beside() ? workspace + RoundUp(sparse_bytes_, 256) : workspace);
  if (run.sparse.empty()) run.dense.FollowAppend();
  written.waves = run.sparse.Views();
  written.dense_waves = run.dense.Views();
  return absl::OkStatus();
}

absl::StatusOr<StepPlan> StepPlanner::Plan(const StepContext& step, std::byte* workspace,
                                           PlannedLayers& layers) {
  StepPlan plan;
  for (const StreamStepPart& part : options_.parts) {
    plan.lengths.push_back(part.rows->front().token_count() + options_.token_count);
  }
  // Layers have nothing in common, so threads share them.
  std::vector<Written> written(layers.runs.size());
  InParallel([&](size_t layer) {
    LayerRun& run = *layers.runs[layer];
    const auto number = static_cast<int>(layer);
    PlanLayer(number, plan.lengths, step, FasterDense(number, plan.lengths), run);
    written[layer].status = Write(run, workspace, layers, written[layer]);
  });
  for (Written& of_layer : written) {
    RETURN_IF_ERROR(of_layer.status);
    std::ranges::move(of_layer.updates, std::back_inserter(plan.updates));
    std::ranges::move(of_layer.waves, std::back_inserter(plan.waves));
    std::ranges::move(of_layer.dense_waves, std::back_inserter(plan.dense_waves));
  }
  return plan;
}

void StepPlanner::Undo(bool forget) {
  for (const StreamStepPart& part : options_.parts) {
    for (int layer = 0; layer < spec().layer_count; ++layer) {
      LayerIndex& of_layer = index(part, layer);
      of_layer.Truncate((*part.rows)[layer].token_count());
      if (forget) of_layer.ForgetTables();
    }
  }
}

}  // namespace spillway::cuda
