#pragma once

#include <cstdint>
#include <deque>
#include <memory>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "daemon/engine/attend_sums.h"
#include "daemon/engine/engine.h"
#include "daemon/engine/step.h"
#include "host/device/stream_step.h"

namespace spillway {

// Decodes some sequences of one model on streams of the caller's: each step's
// attends are enqueued, from and to tensors in the device's memory, and can be
// captured into a graph that runs for every step (StreamStep). Holds its sequences:
// until it is gone, other requests for them are refused. One thread at a time.
class StreamDecoder {
 public:
  using Part = Step::Part;

  // token_count: new tokens of each sequence in a step; token_count_max: that a
  // sequence may come to, for which memory is made. Waits for what was asked of
  // the sequences before. INVALID_ARGUMENT for no parts or too many, a sequence
  // twice or of another model, or counts out of range; OUT_OF_RANGE or ABORTED for a
  // sequence that is not as its part says; FAILED_PRECONDITION for one that is held or
  // sealed; UNIMPLEMENTED as Device::CreateStreamStep.
  static absl::StatusOr<std::unique_ptr<StreamDecoder>> Create(Engine* engine,
                                                               std::vector<Part> parts,
                                                               int64_t token_count,
                                                               int64_t token_count_max);
  // Ends the step as Finish() on the stream that was used last, whose errors are
  // lost, and lets the sequences go.
  ~StreamDecoder();

  const Model& model() const { return *parts_.front().sequence->model; }
  int part_count() const { return static_cast<int>(parts_.size()); }
  int64_t token_count() const { return token_count_; }
  // The device that the sequences live on.
  Device& home() const { return engine_->device_->HomeOf(*parts_.front().sequence->device); }

  // Ends the step before and announces the next one's tokens on the stream. Waits
  // only if the step before the one before has not ended. Errors of an earlier step
  // come first, one a call: what it and later steps brought to the sequences that
  // it is of is truncated. Else as Engine::Append and StreamStep::Announce.
  absl::Status Next(void* stream);
  // See StreamStep::version().
  uint64_t version() const { return step_->version(); }
  // Enqueues a layer of the step, see StreamStep::Attend().
  absl::Status Attend(int layer, const StepTensors& tensors, void* stream);
  // Ends the step and waits for all: the tokens belong to the sequences now. The
  // first error, as with Next(). A step of which no layer was attended is taken
  // back without one.
  absl::Status Finish(void* stream);
  // What the layer of the last step that has ended came to; null before one has, and
  // once another has begun.
  const Job* ended(int layer) const;
  // Of the layer's steps that have ended well, all sequences. REQUIRES: a layer of the
  // model.
  const AttendSums& sums(int layer) const { return sums_[layer]; }

 private:
  StreamDecoder(Engine* engine, std::vector<Part> parts, int64_t token_count)
      : engine_(engine), parts_(std::move(parts)), token_count_(token_count) {
    sums_.resize(model().spec.layer_count);
  }

  absl::Status CheckLayers() const;
  absl::Status Prepare();
  // Waits for the oldest step, and after an error for all.
  absl::Status Settle();
  void Truncate(size_t part, int64_t token_count);
  void Count(size_t part);

  Engine* const engine_;
  const std::vector<Part> parts_;
  const int64_t token_count_;
  std::shared_ptr<Engine::HoldOperation> hold_;
  std::unique_ptr<StreamStep> step_;
  // Of each step on its way, the parts' lengths before.
  std::deque<std::vector<int64_t>> starts_;
  std::vector<AttendSums> sums_;
  bool has_ended_ = false;
  void* last_stream_ = nullptr;
};

}  // namespace spillway
