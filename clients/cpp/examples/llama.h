// A Llama, but for its attention.
#pragma once

#include <cstdint>

#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "checkpoint.h"

// Attention of new tokens at a layer, after the positional encoding: of q [T, H_q * d] over all
// tokens up to each one's own, with these k and v [T, H_kv * d] for the new ones. Writes out, like
// q.
using Attend =
    absl::FunctionRef<absl::Status(int layer, Matrix& q, Matrix& k, Matrix& v, Matrix& out)>;

// Thread-safe. The checkpoint outlives it.
class Llama {
 public:
  explicit Llama(const Checkpoint& checkpoint);

  // The likeliest token after `ids`, of which the first is at `position`. Errors are attend's, and
  // OUT_OF_RANGE where a logit is not finite.
  // REQUIRES: ids are not empty, and in [0, vocabulary_size).
  absl::StatusOr<int64_t> Next(absl::Span<const int64_t> ids, int64_t position,
                               Attend attend) const;

 private:
  Matrix Norm(const Matrix& x, const Matrix& weight) const;
  void Rotate(int64_t position, Matrix& heads) const;

  const Checkpoint& checkpoint_;
  Eigen::Array<float, 1, Eigen::Dynamic> frequencies_;  // [d / 2], radians a token
};
