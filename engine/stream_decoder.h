#pragma once

#include <cstdint>
#include <deque>
#include <memory>
#include <optional>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "engine/attend_sums.h"
#include "engine/engine.h"
#include "engine/step.h"
#include "host/base/task_thread.h"
#include "host/device/stream_step.h"

namespace spillway {

// Decodes sequences of one model on streams of the caller. Each step's attends are enqueued, with
// tensors in the device's memory, and can be captured into a graph that runs for every step
// (StreamStep). Holds its sequences: other requests for them are refused until it is destroyed. One
// thread at a time.
class StreamDecoder {
 public:
  using Part = Step::Part;

  // token_count: new tokens of each sequence in a step. token_count_max: the length up to which a
  // sequence may grow, for which memory is reserved. Waits for earlier requests for the sequences.
  // INVALID_ARGUMENT for no parts or too many, for a sequence that is named twice or is of another
  // model than the first one, or for counts out of range; NOT_FOUND for a deleted sequence;
  // OUT_OF_RANGE or ABORTED if a sequence does not have the length or the generation of its part;
  // FAILED_PRECONDITION if a sequence is held or sealed; UNIMPLEMENTED as
  // Device::CreateStreamStep().
  static absl::StatusOr<std::unique_ptr<StreamDecoder>> Create(Engine* engine,
                                                               std::vector<Part> parts,
                                                               int64_t token_count,
                                                               int64_t token_count_max);
  // Ends the step as Finish() does, on the stream that was used last, drops its errors, and
  // releases the sequences.
  ~StreamDecoder();

  const Model& model() const { return *parts_.front().sequence->model; }
  int part_count() const { return static_cast<int>(parts_.size()); }
  int64_t token_count() const { return token_count_; }
  // The device on which the sequences live.
  Device& home() const { return engine_->device_->HomeOf(*parts_.front().sequence->device); }

  // Ends the current step, and announces the tokens of the next one on the stream. Waits only if
  // the step before the current one has not ended, or for WorkAhead(). Errors of earlier steps are
  // returned first, one per call. Then the sequences that failed lose the tokens of the failed
  // step, and all sequences lose those of later steps. Else errors are those of Engine::Append()
  // and StreamStep::Announce().
  absl::Status Next(void* stream);
  // See StreamStep::version().
  uint64_t version() const { return step_->version(); }
  // Enqueues a layer of the step, see StreamStep::Attend().
  absl::Status Attend(int layer, const StepTensors& tensors, void* stream);
  // Enqueues all layers of the step as a part of a caller's graph, see StreamStep::Run().
  absl::Status Run(StepGraph& graph, void* stream);
  // Ends the step, and waits for all steps: their tokens belong to the sequences then. Returns the
  // first error, as Next() does. A step of which no layer was attended is undone without an error.
  absl::Status Finish(void* stream);
  // The job of a layer in the last step that has ended; null before a step has ended, and after the
  // next one was announced.
  const Job* ended(int layer) const;
  // Sums over the steps of the layer that ended without an error, and over all sequences. REQUIRES:
  // a layer of the model.
  const AttendSums& sums(int layer) const { return sums_[layer]; }

 private:
  StreamDecoder(Engine* engine, std::vector<Part> parts, int64_t token_count,
                int64_t token_count_max)
      : engine_(engine),
        parts_(std::move(parts)),
        token_count_(token_count),
        token_count_max_(token_count_max) {
    sums_.resize(model().spec.layer_count);
  }

  absl::Status CheckLayers() const;
  absl::Status Prepare();
  // In a thread of its own, while the caller enqueues the attends of the step that was announced
  // last: prepares and plans the next step, and counts the oldest one if it has ended. Does not
  // wait for steps. Errors are left to the calls that would return them.
  void WorkAhead();
  void TryToWorkAhead();
  // Gives up what WorkAhead() has left half done.
  void MendAhead();
  // Whether the next step is within token_count_max.
  bool HasRoom() const;
  // Gives up what WorkAhead() has prepared and planned.
  void DropAhead();
  // Waits for the oldest step, and after an error for all steps.
  absl::Status Settle();
  // Records that the device failed. The destructor drops the tokens of the steps in starts_.
  absl::Status Fail(const absl::Status& status);
  void Truncate(size_t part, int64_t token_count);
  // Keeps the tokens of the parts that succeeded in the oldest step, and counts the step. Returns
  // the sums by layer.
  std::vector<AttendSums> Count(const StreamStep::Outcome& outcome);
  // The same for one part.
  void Count(size_t part, int64_t token_count, std::vector<AttendSums>& sums);
  // How many threads share a loop over parts and layers.
  size_t Shares() const;
  // Calls f(part) for all parts, in so many threads.
  template <typename F>
  void InParallel(F f) const;

  Engine* const engine_;
  const std::vector<Part> parts_;
  const int64_t token_count_;
  const int64_t token_count_max_;
  std::shared_ptr<Engine::HoldOperation> hold_;
  std::unique_ptr<StreamStep> step_;
  // Why the device failed; every later call returns it.
  absl::Status failure_;
  // For each pending step, and for steps whose outcome is unknown because the device failed: the
  // lengths of the parts before it.
  std::deque<std::vector<int64_t>> starts_;
  std::vector<AttendSums> sums_;
  bool has_ended_ = false;
  void* last_stream_ = nullptr;
  int64_t announced_count_ = 0;
  // What WorkAhead() has done: pages of the next step, and the sums of the oldest one.
  bool is_prepared_ = false;
  bool is_half_done_ = false;
  std::optional<std::vector<AttendSums>> counted_;
  TaskThread ahead_;
};

}  // namespace spillway
