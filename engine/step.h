#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "engine/engine.h"
#include "host/device/cancel.h"
#include "host/device/step_tensors.h"

namespace spillway {

// A decode step of sequences of one model. Create() announces the new tokens once; then each layer
// needs only its tensors. One thread at a time.
class Step {
 public:
  struct Part {
    std::shared_ptr<Sequence> sequence;
    int64_t start = 0;  // position of the first new token, in every layer
    int64_t generation = 0;
    Policy policy;  // valid for the model
  };

  // INVALID_ARGUMENT for no parts or too many, for a sequence that is named twice or is of another
  // model than the first one, or for a token_count outside [1, 16].
  // trace: trace id of the step; may be empty.
  static absl::StatusOr<std::unique_ptr<Step>> Create(Engine* engine, std::vector<Part> parts,
                                                      int64_t token_count, std::string trace = {});

  const Model& model() const { return *parts_.front().sequence->model; }
  int part_count() const { return static_cast<int>(parts_.size()); }
  int64_t token_count() const { return token_count_; }

  // Appends K and V of the new tokens to a layer, attends, and waits for the result: in this
  // thread, if the device computes on the CPU. What is wrong with one part, such as an element that
  // is not finite or a position that does not follow, fails the whole step before anything has
  // changed. If parts fail on the device, the first such error is returned; with several parts, it
  // names the sequence. The outputs of the other parts are written all the same. tensors: in host
  // memory; they must not change until this returns.
  absl::Status Attend(int layer, const StepTensors& tensors);
  // The same without waiting. `done` gets the result, in this thread or another one; neither the
  // tensors nor the step may change or end before. cancel: may be null.
  void Start(int layer, const StepTensors& tensors, std::shared_ptr<CancelToken> cancel,
             std::function<void(absl::Status)> done);

  // The job of the last attend, with certificates and counts. Null before the first attend, and
  // after one that was refused as a whole.
  const Job* last() const { return outcome_.job.get(); }
  // Frees the job of the last attend.
  void DropLast() { outcome_ = {}; }

 private:
  Step(Engine* engine, std::vector<Part> parts, int64_t token_count, std::string trace)
      : engine_(engine),
        parts_(std::move(parts)),
        token_count_(token_count),
        trace_(std::move(trace)) {}

  absl::StatusOr<AttendRequest> RequestOf(int layer, const StepTensors& tensors);
  // Keeps the outcome of an attend, and writes its outputs.
  absl::Status Take(const StepTensors& tensors, absl::StatusOr<AttendOutcome> outcome);
  // The same error; if the step has several parts, it names the sequence.
  absl::Status AtPart(size_t index, const absl::Status& status) const;

  Engine* const engine_;
  const std::vector<Part> parts_;
  const int64_t token_count_;
  const std::string trace_;
  std::vector<std::byte> q_;  // copy of the queries in C order, if the caller's are not
  AttendOutcome outcome_;
};

}  // namespace spillway
