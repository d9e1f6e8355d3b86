#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "gpu/device/dense_pipeline.h"
#include "gpu/device/job_context.h"
#include "gpu/device/sparse_pipeline.h"
#include "gpu/device/stream_step.h"
#include "gpu/kernels/step_append.h"
#include "host/base/parallel.h"

namespace spillway::cuda {

// One layer of an announcement, planned and written.
struct LayerRun {
  LayerRun(Gpu gpu, StepContext step_context)
      : step(step_context), context(&job, &step, gpu), sparse(&context), dense(&context) {}

  Job job;
  StepContext step;
  JobContext context;
  SparsePipeline sparse;
  DensePipeline dense;
  RowTarget* targets = nullptr;   // pinned, [B][T][H]
  StepEncode* encodes = nullptr;  // pinned, [B]
  StepLength* lengths = nullptr;  // the same
};

// The layers of an announcement, and the pinned memory in which they are written. They are planned
// anew for each announcement of a slot, in the memory of the one before.
struct PlannedLayers {
  std::byte* requests = nullptr;  // [L] of PlanBytes::requests; what is uploaded
  std::byte* results = nullptr;   // [L] of PlanBytes::results; what the GPU writes
  std::vector<std::unique_ptr<LayerRun>> runs;
};

// What an announcement needs beside its layers.
struct StepPlan {
  std::vector<int64_t> lengths;  // of the parts, with its tokens
  std::vector<TableUpdate> updates;
  std::vector<Wave> waves;
  std::vector<DenseWave> dense_waves;
  bool has_new_launches = false;  // other ones than the announcement before
};

// Memory for any announcement of a step.
struct PlanBytes {
  int64_t requests = 0;  // of a layer
  int64_t results = 0;   // the same
  int64_t workspace = 0;
};

// Plans the announcements of a step on one GPU: which parts are dense at which layers, where the
// rows of new tokens go, and what the kernels read. Enqueues nothing. For one thread at a time,
// which may be another one than that which enqueues an earlier announcement.
class StepPlanner {
 public:
  // Both must outlive this object, and so must the sequences of the parts, in use.
  StepPlanner(const StreamStepHome& home, const StreamStepOptions& options)
      : home_(home), options_(options) {}

  // UNIMPLEMENTED for models and policies that steps do not serve.
  absl::Status Check() const;
  // Measures what announcements up to token_count_max take. To be called before Plan().
  PlanBytes Measure();
  // Layers without memory.
  std::vector<std::unique_ptr<LayerRun>> MakeRuns() const;

  // OUT_OF_RANGE if the next tokens are beyond token_count_max; UNIMPLEMENTED if only a job can
  // append them.
  absl::Status CheckLengths() const;
  // Whether a layer of a part needs a job first: its first pages exist and are not indexed, or rows
  // that are to be in GPU memory are not there.
  bool Lacks(const StreamStepPart& part, int layer) const;
  // Plans the tokens that follow the parts' rows, whose pages were prepared, and writes them to
  // `layers`. workspace: in GPU memory. The index of each part then counts the tokens.
  absl::StatusOr<StepPlan> Plan(const StepContext& step, std::byte* workspace,
                                PlannedLayers& layers);
  // What the GPU knows of the parts is what it knows of their rows now. forget: table updates were
  // handed out that do not run.
  void Undo(bool forget);

  // Whether a layer's sparse and dense attends run at the same time: the first wait for the link,
  // and the second read copies of rows. Without such copies there are few dense attends.
  bool runs_beside() const { return home_.model->has_copies(); }
  // Calls f(layer) for all layers, which several threads share if there is much to do.
  template <typename F>
  void InParallel(F f) const {
    const int64_t units =
        spec().layer_count * item_count() * options_.token_count * spec().kv_head_count;
    const auto layer_count = static_cast<size_t>(spec().layer_count);
    const size_t shares = ShareCount(units, home_.workers->max_concurrency());
    if (shares == 1) return InShares(1, layer_count, f);
    home_.workers->execute([&] { InShares(shares, layer_count, f); });
  }

 private:
  // What comes of writing one layer.
  struct Written {
    absl::Status status;
    std::vector<TableUpdate> updates;
    std::vector<Wave> waves;
    std::vector<DenseWave> dense_waves;
  };

  const ModelSpec& spec() const { return home_.model->spec(); }
  int64_t item_count() const { return static_cast<int64_t>(options_.parts.size()); }
  LayerIndex& index(const StreamStepPart& part, int layer) const {
    return static_cast<CudaSequence&>(*part.sequence).layers[layer];
  }

  // Returns the most bytes that a layer takes if parts are dense or as their policies say; raises
  // the bytes of the workspaces to the largest.
  PlanBytes MeasureLayers(bool dense);
  // Which parts are dense at a layer because all its rows are in GPU memory and that is faster.
  std::vector<bool> FasterDense(int layer, const std::vector<int64_t>& lengths) const;
  // Plans a layer whose attends see up to lengths[i] tokens of part i. dense: parts that are dense
  // whatever their policies say.
  void PlanLayer(int layer, const std::vector<int64_t>& lengths, const StepContext& step,
                 const std::vector<bool>& dense, LayerRun& run) const;
  // Writes a planned layer.
  absl::Status Write(LayerRun& run, std::byte* workspace, const PlannedLayers& layers,
                     Written& written) const;
  // Whether a planned layer has room. request_bytes: taken already.
  absl::Status CheckFits(LayerRun& run, int64_t request_bytes) const;
  absl::Status WriteAppend(LayerRun& run, std::vector<TableUpdate>& updates) const;

  const StreamStepHome& home_;
  const StreamStepOptions& options_;
  PlanBytes bytes_;
  // Of the workspaces of a layer's sparse and of its dense attends.
  int64_t sparse_bytes_ = 0, dense_bytes_ = 0;
};

}  // namespace spillway::cuda
