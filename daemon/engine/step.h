#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "daemon/engine/engine.h"
#include "host/base/dtype.h"

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

  // Where an input or output lies: of its first element, and how far sequences,
  // tokens and heads are apart, bytes. The elements of a head lie side by side.
  template <typename Byte>
  struct Place {
    Byte* data = nullptr;
    int64_t sequence_stride = 0;
    int64_t token_stride = 0;
    int64_t head_stride = 0;
    Byte* At(int64_t sequence) const { return data + sequence * sequence_stride; }
  };

  // Of one layer, sequences in the step's order. They stay as they are until
  // the attend is over.
  struct Tensors {
    DType q_dtype = DType::kF32;
    Place<const std::byte> q;  // [B, T, H_q, d]
    Place<const std::byte> k;  // [B, T, H_kv, d] in the model's dtype
    Place<const std::byte> v;  // the same
    DType out_dtype = DType::kF32;
    Place<std::byte> out;  // [B, T, H_q, d]
    float* lse = nullptr;  // [B, T, H_q] in C order, or null
  };

  // INVALID_ARGUMENT for no parts or too many, a sequence twice or of another
  // model, or token_count beyond [1, 16].
  static absl::StatusOr<std::unique_ptr<Step>> Create(Engine* engine, std::vector<Part> parts,
                                                      int64_t token_count);

  const Model& model() const { return *parts_.front().sequence->model; }

  // Appends the new tokens' K and V of a layer and attends, and waits for it:
  // in this thread, where the device computes on the CPU. An element that is
  // not finite, a position that does not follow and everything else is as with
  // a Decode message of each sequence. The first error is returned, naming its
  // part where there are several; the others' outputs are written all the same.
  absl::Status Attend(int layer, const Tensors& tensors);

  // The last attend, for its certificates and counts; null before the first.
  const Job* last() const { return outcome_.job.get(); }

 private:
  Step(Engine* engine, std::vector<Part> parts, int64_t token_count)
      : engine_(engine), parts_(std::move(parts)), token_count_(token_count) {}

  absl::StatusOr<AttendRequest> RequestOf(int layer, const Tensors& tensors);

  Engine* const engine_;
  const std::vector<Part> parts_;
  const int64_t token_count_;
  std::vector<std::byte> q_;  // queries in C order, where they are not
  AttendOutcome outcome_;
};

}  // namespace spillway
