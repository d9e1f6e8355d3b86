#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "daemon/engine/engine.h"
#include "host/device/step_tensors.h"

namespace spillway {

// A decode step of sequences of one model, announced once: what follows, layer
// by layer, are tensors alone. One thread at a time.
class Step {
 public:
  struct Part {
    std::shared_ptr<Sequence> sequence;
    int64_t start = 0;  // position of the first new token, in every layer
    int64_t generation = 0;
    Policy policy;  // valid for the model
  };

  // INVALID_ARGUMENT for no parts or too many, a sequence twice or of another
  // model, or token_count beyond [1, 16].
  // trace: by what its client's tracing knows it; may be empty.
  static absl::StatusOr<std::unique_ptr<Step>> Create(Engine* engine, std::vector<Part> parts,
                                                      int64_t token_count, std::string trace = {});

  const Model& model() const { return *parts_.front().sequence->model; }
  int part_count() const { return static_cast<int>(parts_.size()); }
  int64_t token_count() const { return token_count_; }

  // Appends the new tokens' K and V of a layer and attends, and waits for it:
  // in this thread, where the device computes on the CPU. An element that is
  // not finite, a position that does not follow and everything else is as with
  // a Decode message of each sequence. The first error is returned, naming its
  // part where there are several; the others' outputs are written all the same.
  // tensors: in host memory; they stay as they are until the attend is over.
  absl::Status Attend(int layer, const StepTensors& tensors);

  // The last attend, for its certificates and counts; null before the first.
  const Job* last() const { return outcome_.job.get(); }

 private:
  Step(Engine* engine, std::vector<Part> parts, int64_t token_count, std::string trace)
      : engine_(engine),
        parts_(std::move(parts)),
        token_count_(token_count),
        trace_(std::move(trace)) {}

  absl::StatusOr<AttendRequest> RequestOf(int layer, const StepTensors& tensors);

  Engine* const engine_;
  const std::vector<Part> parts_;
  const int64_t token_count_;
  const std::string trace_;
  std::vector<std::byte> q_;  // queries in C order, where they are not
  AttendOutcome outcome_;
};

}  // namespace spillway
