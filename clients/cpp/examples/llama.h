// A Llama without its attention.
#pragma once

#include <cstdint>

#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "checkpoint.h"

// Computes attention of new tokens at a layer, after the positional encoding. Each query of q [T,
// H_q * d] attends to all tokens up to its own. k and v [T, H_kv * d] are those of the new tokens.
// Writes out, shaped like q.
using Attend =
    absl::FunctionRef<absl::Status(int layer, Matrix& q, Matrix& k, Matrix& v, Matrix& out)>;

// Thread-safe. The checkpoint must outlive it.
class Llama {
 public:
  explicit Llama(const Checkpoint& checkpoint);

  // Returns the most likely token after `ids`; the first of them is at `position`. Returns attend's
  // errors, and OUT_OF_RANGE if a logit is not finite.
  // REQUIRES: ids is not empty; its elements are in [0, vocabulary_size).
  absl::StatusOr<int64_t> Next(absl::Span<const int64_t> ids, int64_t position,
                               Attend attend) const;

 private:
  Matrix Norm(const Matrix& x, const Matrix& weight) const;
  void Rotate(int64_t position, Matrix& heads) const;

  const Checkpoint& checkpoint_;
  Eigen::Array<float, 1, Eigen::Dynamic> frequencies_;  // [d / 2], radians per token
};
