#include "gpu/device/stream_step.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <future>
#include <optional>
#include <span>
#include <utility>

#include "absl/cleanup/cleanup.h"
#include "absl/strings/str_cat.h"
#include "gpu/cuda/buffer.h"
#include "gpu/cuda/current_device.h"
#include "gpu/device/carver.h"
#include "gpu/device/step_checks.h"
#include "gpu/device/step_graph.h"
#include "gpu/device/step_planner.h"
#include "host/base/status_macros.h"

namespace spillway::cuda {
namespace {

constexpr int kSlotCount = StepResources::kSlotCount;
// Most updates of page tables that a slot holds.
constexpr int64_t kUpdatesMax = 1 << 16;
// Graphs that a layer keeps, each for different tensors, and launches before one is captured. That
// takes as long as many launches, and some decoders make few steps.
constexpr size_t kGraphsOfLayer = 4;
constexpr int kLaunchesBefore = 8;
// Callers' graphs that a step keeps with its attends in them.
constexpr size_t kRunsMax = 4;

// An announcement, and its pinned memory.
struct Slot {
  std::byte* memory = nullptr;
  Event done;
  bool concluded = false;
  std::vector<RetiredPages::Work> works;  // of each part, while it is pending
  StepHeader* header = nullptr;
  TableUpdate* updates = nullptr;
  PlannedLayers layers;
};

// A layer's launches for certain tensors. Callers that enqueue attends one by one pass the same
// memory again and again, because their allocators reuse it. While prompts of other requests are
// computed, a decoder may serve only two steps, for which a graph is not worth its making.
struct LayerGraph {
  StepTensors tensors;
  int launch_count = 0;  // without the graph
  Graph graph;
};

// A caller's graph with the attends of version_ in it.
struct StepRun {
  uint64_t number;  // CudaStepGraph::number()
  Graph graph;
};

class CudaStreamStep final : public StreamStep {
 public:
  CudaStreamStep(const StreamStepHome& home, StreamStepOptions options)
      : home_(home), options_(std::move(options)), planner_(home_, options_) {
    for (const StreamStepPart& part : options_.parts) {
      auto& sequence = static_cast<CudaSequence&>(*part.sequence);
      uses_.push_back(sequence.Use());
      sequence.ExpectAppends(options_.token_count);
    }
  }
  ~CudaStreamStep() override {
    const CurrentDevice current(home_.ordinal);
    // Launches of an announcement that was not concluded may run on any stream.
    for (; pending_count_ > 0; --pending_count_) {
      Slot& slot = oldest();
      SPILLWAY_CUDA_REPORT(slot.concluded ? cudaEventSynchronize(slot.done.get())
                                          : cudaDeviceSynchronize());
      EndUse(slot);
    }
    slots_ = {};
    graphs_.clear();
    runs_.clear();
    if (resources_.has_value() && !failed_) home_.resources->Keep(*std::move(resources_));
    // While this GPU is the current device.
    resources_.reset();
  }

  absl::Status Open();
  absl::Status Announce(void* stream) override;
  uint64_t version() const override { return version_; }
  absl::Status Attend(int layer, const StepTensors& tensors, void* stream) override;
  absl::Status Run(StepGraph& graph, void* stream) override;
  absl::Status Conclude(void* stream) override;
  int pending_count() const override { return pending_count_; }
  // Either all sequences of an engine have records, or none.
  bool keeps_lengths() const override {
    return options_.parts.front().rows->front().length_word() != nullptr;
  }
  bool works_ahead() const override { return true; }
  absl::Status PlanAhead() override;
  bool is_planned() const override { return plan_.has_value(); }
  void DropPlan() override;
  const absl::StatusOr<Outcome>* Collect() override;
  absl::StatusOr<Outcome> Settle() override;
  const Job& settled(int layer) const override { return settled_->layers.runs[layer]->job; }

 private:
  const ModelSpec& spec() const { return home_.model->spec(); }
  int64_t item_count() const { return static_cast<int64_t>(options_.parts.size()); }
  const Slot& newest() const { return slots_[(announced_count_ - 1) % kSlotCount]; }
  Slot& newest() { return slots_[(announced_count_ - 1) % kSlotCount]; }
  Slot& oldest() { return slots_[(announced_count_ - pending_count_) % kSlotCount]; }
  // Of the next announcement.
  Slot& next() { return slots_[announced_count_ % kSlotCount]; }

  // From the first to the second, the GPU may read copies that the parts have at the first.
  void BeginUse(Slot& slot);
  void EndUse(Slot& slot);
  RetiredPages& retired(size_t part) const {
    return static_cast<CudaSequence&>(*options_.parts[part].sequence).retired();
  }
  // Does what no step can do: indexes first pages of parts, and copies rows that are to be in GPU
  // memory.
  absl::Status CatchUp(cudaStream_t stream);
  // Writes the next announcement to its slot. Sets plan_; after an error there is none.
  absl::Status Plan();
  // Brings what the slot has to the GPU.
  absl::Status Upload(Slot& slot, StepPlan plan, cudaStream_t stream);
  absl::StatusOr<Outcome> CollectOldest();
  absl::Status UpdateTables(Slot& slot, const std::vector<TableUpdate>& updates,
                            cudaStream_t stream) const;
  // Puts a layer's kernels on the stream. of_graph: they are captured, and run for any announcement
  // of this version. Otherwise they run once, and the host's time for each launch counts.
  absl::Status Enqueue(int layer, const StepTensors& tensors, cudaStream_t stream, bool of_graph);
  // The part of an append that follows the copies of the rows: codes of pages that are full now,
  // and the lengths that outlive the process. The codes' kernel has work only if pages are full.
  absl::Status EnqueueRest(LayerRun& run, cudaStream_t stream, bool overlap, bool encode = true);
  // Whether the announcement completes pages of a layer, whose codes are to be made.
  bool CompletesPages(const LayerRun& run) const;
  absl::Status CheckAnnounced() const;
  absl::StatusOr<Graph> Compose(const CudaStepGraph& graph);
  // The layer's graph for these tensors, maybe not captured yet.
  LayerGraph& FindGraph(int layer, const StepTensors& tensors);

  const StreamStepHome home_;
  const StreamStepOptions options_;
  std::vector<ResidencyUse> uses_;  // so that the sequences keep their rows
  StepPlanner planner_;
  int64_t upload_bytes_ = 0;
  std::optional<StepResources> resources_;
  // The stream of the last attend since the announcement; none if all are in graphs of the caller.
  std::optional<cudaStream_t> ran_on_;
  // Whether something may still run that no announcement tells of. Freeing memory waits for it.
  bool failed_ = false;
  std::byte* memory_ = nullptr;  // on the GPU: uploaded data, bad elements [L][B], workspace
  BadElement* bad_ = nullptr;
  std::byte* workspace_ = nullptr;
  std::array<Slot, kSlotCount> slots_;
  uint64_t announced_count_ = 0;
  int pending_count_ = 0;
  std::optional<StepPlan> plan_;                      // of the next announcement, in its slot
  std::optional<absl::StatusOr<Outcome>> collected_;  // of the oldest announcement
  uint64_t version_ = 0;
  // The launches of all layers in the newest announcement.
  std::vector<Wave> waves_;
  std::vector<DenseWave> dense_waves_;
  // By layer, most recently used first; for version_.
  std::vector<std::vector<LayerGraph>> graphs_;
  std::vector<StepRun> runs_;  // the same
  const Slot* settled_ = nullptr;
};

absl::Status CudaStreamStep::Open() {
  const CurrentDevice current(home_.ordinal);
  RETURN_IF_ERROR(current.status());
  RETURN_IF_ERROR(planner_.Check());
  const PlanBytes bytes = planner_.Measure();
  Carver uploaded, pinned, device;
  uploaded.Take<StepHeader>(1);
  const int64_t requests_at = uploaded.bytes();
  uploaded.Take<std::byte>(bytes.requests * spec().layer_count);
  upload_bytes_ = uploaded.bytes();
  pinned.Take<std::byte>(upload_bytes_);
  const int64_t results_at = pinned.bytes();
  pinned.Take<std::byte>(bytes.results * spec().layer_count);
  const int64_t updates_at = pinned.bytes();
  pinned.Take<TableUpdate>(kUpdatesMax);
  graphs_.resize(static_cast<size_t>(spec().layer_count));
  device.Take<std::byte>(upload_bytes_);
  const int64_t bad_at = device.bytes();
  device.Take<BadElement>(spec().layer_count * item_count());
  const int64_t workspace_at = device.bytes();
  device.Take<std::byte>(bytes.workspace);
  ASSIGN_OR_RETURN(resources_, home_.resources->Take(device.bytes(), pinned.bytes()));
  for (int i = 0; i < kSlotCount; ++i) {
    Slot& slot = slots_[i];
    slot.memory = resources_->pinned[i].data();
    // Not what another step has left there.
    std::memset(slot.memory, 0, sizeof(StepHeader));
    std::memset(slot.memory + results_at, 0, static_cast<size_t>(updates_at - results_at));
    ASSIGN_OR_RETURN(slot.done, Event::Create(/*timing=*/false));
    slot.header = reinterpret_cast<StepHeader*>(slot.memory);
    slot.layers = {slot.memory + requests_at, slot.memory + results_at, planner_.MakeRuns()};
    slot.updates = reinterpret_cast<TableUpdate*>(slot.memory + updates_at);
  }
  memory_ = resources_->device.data();
  bad_ = reinterpret_cast<BadElement*>(memory_ + bad_at);
  workspace_ = memory_ + workspace_at;
  // The caller's stream may not wait for the default stream, so cudaMemset() could be late.
  cudaStream_t stream = resources_->capture.get();
  SPILLWAY_CUDA_RETURN_IF_ERROR(
      cudaMemsetAsync(memory_, 0, static_cast<size_t>(workspace_at), stream));
  SPILLWAY_CUDA_RETURN_IF_ERROR(cudaStreamSynchronize(stream));
  for (const StreamStepPart& part : options_.parts) {
    auto& sequence = static_cast<CudaSequence&>(*part.sequence);
    for (int layer = 0; layer < std::ssize(sequence.layers); ++layer) {
      RETURN_IF_ERROR(sequence.Reserve(layer, options_.token_count_max));
    }
  }
  return absl::OkStatus();
}

// Announcements, and whatever waits, cannot be part of a graph.
absl::Status CheckNotCaptured(cudaStream_t stream) {
  ASSIGN_OR_RETURN(const bool captured, IsCaptured(stream));
  if (!captured) return absl::OkStatus();
  return absl::FailedPreconditionError(
      "the stream is being captured: only attends can be captured, and each step must begin before "
      "the graph is replayed");
}

absl::Status CudaStreamStep::CatchUp(cudaStream_t stream) {
  for (int layer = 0; layer < spec().layer_count; ++layer) {
    std::unique_ptr<Job> job;
    for (const StreamStepPart& part : options_.parts) {
      if (!planner_.Lacks(part, layer)) continue;
      if (job == nullptr) {
        job = std::make_unique<Job>();
        job->model = home_.model;
        job->layer = layer;
      }
      LayerRows& rows = (*part.rows)[layer];
      JobItem& item = job->items.emplace_back();
      item.sequence = part.sequence;
      item.append.emplace();
      item.append->rows = &rows;
      item.append->start = rows.token_count();
    }
    if (job == nullptr) continue;
    // The rows may not have been written yet.
    SPILLWAY_CUDA_RETURN_IF_ERROR(cudaStreamSynchronize(stream));
    std::promise<absl::Status> done;
    home_.device->Submit(std::move(job), [&done](std::unique_ptr<Job> ended) {
      absl::Status status;
      for (const JobItem& item : ended->items) status.Update(item.status);
      done.set_value(std::move(status));
    });
    RETURN_IF_ERROR(done.get_future().get());
  }
  return absl::OkStatus();
}

absl::Status CudaStreamStep::UpdateTables(Slot& slot, const std::vector<TableUpdate>& updates,
                                          cudaStream_t stream) const {
  for (size_t at = 0; at < updates.size(); at += kUpdatesMax) {
    // So many only if tables are new.
    if (at > 0) SPILLWAY_CUDA_RETURN_IF_ERROR(cudaStreamSynchronize(stream));
    const auto count = std::min<size_t>(updates.size() - at, kUpdatesMax);
    std::copy_n(updates.begin() + static_cast<int64_t>(at), count, slot.updates);
    SPILLWAY_CUDA_RETURN_IF_ERROR(
        LaunchTableUpdates(slot.updates, static_cast<int64_t>(count), stream));
  }
  return absl::OkStatus();
}

absl::Status CudaStreamStep::Announce(void* on) {
  const CurrentDevice current(home_.ordinal);
  RETURN_IF_ERROR(current.status());
  auto* const stream = static_cast<cudaStream_t>(on);
  RETURN_IF_ERROR(CheckNotCaptured(stream));
  if (!plan_.has_value()) {
    RETURN_IF_ERROR(planner_.CheckLengths());
    RETURN_IF_ERROR(CatchUp(stream));
    RETURN_IF_ERROR(Plan());
  }
  const std::vector<int64_t> lengths = plan_->lengths;
  Slot& slot = next();
  if (absl::Status status = Upload(slot, *std::exchange(plan_, std::nullopt), stream);
      !status.ok()) {
    failed_ = true;
    planner_.Undo(/*forget=*/true);
    return status;
  }
  for (size_t i = 0; i < lengths.size(); ++i) {
    for (LayerRows& rows : *options_.parts[i].rows) rows.Commit(lengths[i]);
  }
  slot.concluded = false;
  BeginUse(slot);
  ++announced_count_;
  ++pending_count_;
  return absl::OkStatus();
}

void CudaStreamStep::BeginUse(Slot& slot) {
  slot.works.clear();
  for (size_t i = 0; i < options_.parts.size(); ++i) slot.works.push_back(retired(i).Begin());
}

void CudaStreamStep::EndUse(Slot& slot) {
  for (size_t i = 0; i < slot.works.size(); ++i) retired(i).End(slot.works[i]);
  slot.works.clear();
}

absl::Status CudaStreamStep::PlanAhead() {
  const CurrentDevice current(home_.ordinal);
  RETURN_IF_ERROR(current.status());
  if (plan_.has_value() || !planner_.CheckLengths().ok()) return absl::OkStatus();
  for (const StreamStepPart& part : options_.parts) {
    for (int layer = 0; layer < spec().layer_count; ++layer) {
      if (planner_.Lacks(part, layer)) return absl::OkStatus();
    }
  }
  return Plan();
}

void CudaStreamStep::DropPlan() {
  if (!plan_.has_value()) return;
  const StepPlan plan = *std::exchange(plan_, std::nullopt);
  // While nothing reads the tables, the updates can be made: pages that come later replace them.
  bool made = plan.updates.empty();
  const CurrentDevice current(home_.ordinal);
  if (!made && pending_count_ == 0 && current.status().ok()) {
    cudaStream_t stream = resources_->side.stream.get();
    made = UpdateTables(next(), plan.updates, stream).ok() &&
           cudaStreamSynchronize(stream) == cudaSuccess;
  }
  planner_.Undo(/*forget=*/!made);
}

absl::Status CudaStreamStep::Plan() {
  Slot& slot = next();
  StepContext step;
  step.token_count_max = options_.token_count_max;
  step.workspace_bytes = home_.workspace_bytes;
  step.upload_offset = memory_ - slot.memory;
  step.number = static_cast<uint32_t>(announced_count_ + 1);
  step.lanes = resources_->lanes;
  // Also after an exception, for lack of memory.
  absl::Cleanup undo = [this] { planner_.Undo(/*forget=*/true); };
  ASSIGN_OR_RETURN(StepPlan plan, planner_.Plan(step, workspace_, slot.layers));
  plan.has_new_launches = version_ == 0 || plan.waves != waves_ || plan.dense_waves != dense_waves_;
  plan_ = std::move(plan);
  std::move(undo).Cancel();
  return absl::OkStatus();
}

absl::Status CudaStreamStep::Upload(Slot& slot, StepPlan plan, cudaStream_t stream) {
  if (plan.has_new_launches) {
    version_ = home_.resources->NextVersion();
    for (std::vector<LayerGraph>& of_layer : graphs_) of_layer.clear();
    runs_.clear();
  }
  waves_ = std::move(plan.waves);
  dense_waves_ = std::move(plan.dense_waves);
  *slot.header = {version_, static_cast<uint32_t>(announced_count_ + 1), 0};
  for (int layer = 0; layer < spec().layer_count; ++layer) {
    StepCheck& check = slot.layers.runs[layer]->step.tensors.check;
    check.header = reinterpret_cast<const StepHeader*>(memory_);
    check.version = version_;
    check.bad = bad_ + layer * item_count();
  }
  RETURN_IF_ERROR(UpdateTables(slot, plan.updates, stream));
  return ToStatus(cudaMemcpyAsync(memory_, slot.memory, static_cast<size_t>(upload_bytes_),
                                  cudaMemcpyHostToDevice, stream),
                  "cudaMemcpyAsync");
}

absl::Status CudaStreamStep::CheckAnnounced() const {
  if (pending_count_ > 0 && !newest().concluded) return absl::OkStatus();
  return absl::FailedPreconditionError("no tokens are announced: begin the next step first");
}

absl::Status CudaStreamStep::Attend(int layer, const StepTensors& tensors, void* on) {
  RETURN_IF_ERROR(CheckAnnounced());
  const CurrentDevice current(home_.ordinal);
  RETURN_IF_ERROR(current.status());
  RETURN_IF_ERROR(CheckStepTensors(home_.ordinal, tensors));
  auto* const stream = static_cast<cudaStream_t>(on);
  ASSIGN_OR_RETURN(const bool captured, IsCaptured(stream));
  if (captured) return Enqueue(layer, tensors, stream, /*of_graph=*/true);
  ran_on_ = stream;
  LayerGraph& known = FindGraph(layer, tensors);
  if (known.launch_count < kLaunchesBefore) {
    ++known.launch_count;
    return Enqueue(layer, tensors, stream, /*of_graph=*/false);
  }
  if (!known.graph) {
    cudaStream_t capture = resources_->capture.get();
    ASSIGN_OR_RETURN(known.graph, Graph::Capture(capture, [&] {
                       return Enqueue(layer, tensors, capture, /*of_graph=*/true);
                     }));
  }
  return known.graph.Launch(stream);
}

LayerGraph& CudaStreamStep::FindGraph(int layer, const StepTensors& tensors) {
  std::vector<LayerGraph>& graphs = graphs_[static_cast<size_t>(layer)];
  const auto found = std::ranges::find(graphs, tensors, &LayerGraph::tensors);
  if (found != graphs.end()) {
    std::rotate(graphs.begin(), found, found + 1);
    return graphs.front();
  }
  if (graphs.size() == kGraphsOfLayer) graphs.pop_back();
  return *graphs.insert(graphs.begin(), LayerGraph{tensors, 0, {}});
}

absl::Status CudaStreamStep::Run(StepGraph& of_caller, void* on) {
  RETURN_IF_ERROR(CheckAnnounced());
  const CurrentDevice current(home_.ordinal);
  RETURN_IF_ERROR(current.status());
  auto* const stream = static_cast<cudaStream_t>(on);
  RETURN_IF_ERROR(CheckNotCaptured(stream));
  ran_on_ = stream;
  const auto& graph = static_cast<const CudaStepGraph&>(of_caller);
  RETURN_IF_ERROR(graph.CheckComplete());
  const auto found = std::ranges::find(runs_, graph.number(), &StepRun::number);
  if (found != runs_.end()) {
    std::rotate(runs_.begin(), found, found + 1);
  } else {
    ASSIGN_OR_RETURN(Graph composed, Compose(graph));
    if (runs_.size() == kRunsMax) runs_.pop_back();
    runs_.insert(runs_.begin(), StepRun{graph.number(), std::move(composed)});
  }
  return runs_.front().graph.Launch(stream);
}

absl::StatusOr<Graph> CudaStreamStep::Compose(const CudaStepGraph& graph) {
  std::vector<CapturedGraph> layers;
  for (const CudaStepGraph::OpenAttend& attend : graph.attends()) {
    if (attend.layer < 0 || attend.layer >= spec().layer_count) {
      return absl::InvalidArgumentError(
          absl::StrCat("graph: layer ", attend.layer, " is not in [0, ", spec().layer_count, ")"));
    }
    RETURN_IF_ERROR(CheckStepTensors(home_.ordinal, attend.tensors));
    cudaStream_t capture = resources_->capture.get();
    ASSIGN_OR_RETURN(layers.emplace_back(), CapturedGraph::Of(capture, [&] {
                       return Enqueue(attend.layer, attend.tensors, capture, /*of_graph=*/true);
                     }));
  }
  return graph.With(layers);
}

absl::Status CudaStreamStep::Enqueue(int layer, const StepTensors& tensors, cudaStream_t stream,
                                     bool of_graph) {
  LayerRun& run = *newest().layers.runs[layer];
  run.step.stream = stream;
  CallerTensors& of_step = run.step.tensors;
  of_step.q_dtype = tensors.q_dtype;
  of_step.q = tensors.q;
  of_step.out_dtype = tensors.out_dtype;
  of_step.out = tensors.out;
  of_step.lse = tensors.lse;
  of_step.token_count = static_cast<int32_t>(options_.token_count);
  of_step.query_head_count = spec().query_head_count;
  TensorAppend append;
  append.dtype = spec().dtype;
  append.row_type = spec().row_type;
  append.head_dim = spec().head_dim;
  append.item_count = static_cast<int32_t>(item_count());
  append.kv_head_count = spec().kv_head_count;
  append.k = tensors.k;
  append.v = tensors.v;
  append.targets = run.context.Uploaded(run.targets);
  append.bad = bad_ + layer * item_count();
  append.step = of_step;
  const std::span<uint32_t> clear = run.dense.clear();
  append.clear = clear.data();
  append.clear_count = static_cast<int32_t>(clear.size());
  SPILLWAY_CUDA_RETURN_IF_ERROR(LaunchTensorAppend(append, stream));
  const auto beside = [&](auto first, auto other) -> absl::Status {
    cudaStream_t side = resources_->side.stream.get();
    cudaEvent_t fork = resources_->side.begins.get(), join = resources_->side.ends.get();
    SPILLWAY_CUDA_RETURN_IF_ERROR(cudaEventRecord(fork, stream));
    RETURN_IF_ERROR(first());
    SPILLWAY_CUDA_RETURN_IF_ERROR(cudaStreamWaitEvent(side, fork));
    absl::Status status = other(side);
    // Also after an error, so that the stream waits for what runs.
    status.Update(ToStatus(cudaEventRecord(join, side), "cudaEventRecord"));
    status.Update(ToStatus(cudaStreamWaitEvent(stream, join), "cudaStreamWaitEvent"));
    return status;
  };
  if (!clear.empty()) {
    // Exact attends do not need the rest of the append. To run it beside them takes four calls.
    const auto attend = [&] { return run.dense.Launch(stream); };
    if (of_graph) {
      return beside(attend,
                    [&](cudaStream_t side) { return EnqueueRest(run, side, /*overlap=*/false); });
    }
    RETURN_IF_ERROR(attend());
    return EnqueueRest(run, stream, /*overlap=*/false, CompletesPages(run));
  }
  RETURN_IF_ERROR(EnqueueRest(run, stream, home_.gpu.hopper));
  if (planner_.runs_beside() && !run.sparse.empty() && !run.dense.empty()) {
    return beside([&] { return run.sparse.Launch({}); },
                  [&](cudaStream_t side) { return run.dense.Launch(side); });
  }
  RETURN_IF_ERROR(run.sparse.Launch({}));
  return run.dense.Launch(stream);
}

bool CudaStreamStep::CompletesPages(const LayerRun& run) const {
  return std::any_of(run.encodes, run.encodes + item_count(),
                     [](const StepEncode& encode) { return encode.work.begin < encode.work.end; });
}

absl::Status CudaStreamStep::EnqueueRest(LayerRun& run, cudaStream_t stream, bool overlap,
                                         bool encode) {
  const auto count = static_cast<int>(item_count());
  if (home_.model->has_rotation() && encode) {
    EncodeWork shape;
    shape.head_dim = spec().head_dim;
    shape.kv_head_count = spec().kv_head_count;
    shape.tiling = home_.model->tiling();
    SPILLWAY_CUDA_RETURN_IF_ERROR(LaunchStepEncode(run.context.Uploaded(run.encodes), count, shape,
                                                   home_.model->rotation(run.job.layer), overlap,
                                                   stream));
  }
  if (!keeps_lengths()) return absl::OkStatus();
  return ToStatus(
      LaunchStepLengths(run.context.Uploaded(run.lengths), count, run.step.tensors.check, stream),
      "LaunchStepLengths");
}

absl::Status CudaStreamStep::Conclude(void* stream) {
  if (pending_count_ == 0 || newest().concluded) return absl::OkStatus();
  const CurrentDevice current(home_.ordinal);
  RETURN_IF_ERROR(current.status());
  auto* const of_caller = static_cast<cudaStream_t>(stream);
  RETURN_IF_ERROR(CheckNotCaptured(of_caller));
  // Attends may have gone to another stream than the one on which the step ends.
  if (const std::optional<cudaStream_t> ran_on = std::exchange(ran_on_, std::nullopt);
      ran_on.has_value() && *ran_on != of_caller) {
    SPILLWAY_CUDA_RETURN_IF_ERROR(cudaEventRecord(resources_->side.ends.get(), *ran_on));
    SPILLWAY_CUDA_RETURN_IF_ERROR(cudaStreamWaitEvent(of_caller, resources_->side.ends.get()));
  }
  SPILLWAY_CUDA_RETURN_IF_ERROR(cudaEventRecord(newest().done.get(), of_caller));
  newest().concluded = true;
  return absl::OkStatus();
}

const absl::StatusOr<StreamStep::Outcome>* CudaStreamStep::Collect() {
  if (!collected_.has_value()) {
    const CurrentDevice current(home_.ordinal);
    if (cudaEventQuery(oldest().done.get()) == cudaErrorNotReady) {
      cudaGetLastError();
      return nullptr;
    }
    collected_ = CollectOldest();
  }
  return &*collected_;
}

absl::StatusOr<StreamStep::Outcome> CudaStreamStep::Settle() {
  absl::StatusOr<Outcome> outcome =
      collected_.has_value() ? *std::exchange(collected_, std::nullopt) : CollectOldest();
  EndUse(oldest());
  --pending_count_;
  return outcome;
}

absl::StatusOr<StreamStep::Outcome> CudaStreamStep::CollectOldest() {
  const CurrentDevice current(home_.ordinal);
  const Slot& slot = oldest();
  settled_ = &slot;
  SPILLWAY_CUDA_RETURN_IF_ERROR(cudaEventSynchronize(slot.done.get()));
  Outcome outcome;
  outcome.parts.resize(options_.parts.size());
  planner_.InParallel([&](size_t layer) {
    const LayerRun& run = *slot.layers.runs[layer];
    run.sparse.Collect();
    run.dense.Collect();
  });
  for (const std::unique_ptr<LayerRun>& run : slot.layers.runs) {
    run->context.CollectTimes();
    outcome.ran |= run->step.ran;
    for (size_t i = 0; i < outcome.parts.size(); ++i) {
      const JobItem& item = run->job.items[i];
      outcome.parts[i].Update(item.status);
      static_cast<CudaSequence&>(*item.sequence)
          .CountMoved(item.result.moved_row_count * spec().row_bytes());
    }
  }
  return outcome;
}

}  // namespace

absl::StatusOr<std::unique_ptr<StreamStep>> CreateStreamStep(const StreamStepHome& home,
                                                             StreamStepOptions options) {
  auto step = std::make_unique<CudaStreamStep>(home, std::move(options));
  RETURN_IF_ERROR(step->Open());
  return step;
}

}  // namespace spillway::cuda
