#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "absl/status/status.h"
#include "host/core/softmax_sums.h"
#include "host/cpu/attend_context.h"
#include "host/cpu/kernels.h"

namespace spillway {

class ValuePass;

// Changes the logits of rows before they are folded, for a method's tail. Thread-safe.
class RowWeigher {
 public:
  virtual ~RowWeigher() = default;
  // Changes in place the logits, [G][kRowBlock], of `count` <= kRowBlock rows: those of the folded
  // tokens from index `first` on. rows: their [K | V].
  virtual void Weigh(int64_t first, int count, const std::byte* const* rows,
                     float* logits) const = 0;
};

// The unit of sums over values, and the signs of the projection of values.
struct ValueTerms {
  float unit = 1;            // a power of two
  std::vector<float> signs;  // [d] of ProjectionSigns; read only with moments
};

// Softmax sums and numerators of several query heads over one set of rows. Values are in units of
// ValueTerms::unit. The constructor makes the sums of no rows.
struct GroupSums {
  int head_dim = 0;
  std::vector<RowSums> sums;     // [heads]
  std::vector<float> value;      // [heads][d] sum x v
  std::vector<float> value_sq;   // [heads][d] sum x^2 v; empty without moments
  std::vector<float> projected;  // [heads][kProjectionEntries] sum x^2 y y^T; likewise

  GroupSums() = default;
  GroupSums(int heads, int head_dim, bool moments)
      : head_dim(head_dim),
        sums(heads),
        value(static_cast<size_t>(heads) * head_dim),
        value_sq(moments ? value.size() : 0),
        projected(moments ? static_cast<size_t>(heads) * kProjectionEntries : 0) {}

  bool moments() const { return !value_sq.empty(); }
  // The target of a fold that adds to these sums.
  ValueSums Target(const ValueTerms& terms);
  std::span<const float> ValueOf(int head) const { return Row(value, head, head_dim); }
  std::span<const float> ValueSqOf(int head) const { return Row(value_sq, head, head_dim); }
  std::span<const float> ProjectedOf(int head) const {
    return Row(projected, head, kProjectionEntries);
  }

  // *this += from, sums over other rows.
  void Merge(const GroupSums& from);

 private:
  static std::span<const float> Row(const std::vector<float>& of, int head, int size) {
    return {of.data() + static_cast<size_t>(head) * size, static_cast<size_t>(size)};
  }
};

// How rows are folded, if not as they are; members may be null.
struct FoldOptions {
  const RowWeigher* weigher = nullptr;
  // Folds x v - x^ v^ in place of x v. Needs moments.
  const ValuePass* codes = nullptr;
};

// Folds the rows of a KV head's tokens into `into`, in parallel, with moments if `into` has them.
// queries: the group of one query. OUT_OF_RANGE names a token whose logit is not finite; CANCELLED.
absl::Status FoldTokens(const AttendContext& context, int kv_head, const GroupQueries& queries,
                        const ValueTerms& values, std::span<const uint32_t> tokens, GroupSums& into,
                        const FoldOptions& options = {});

}  // namespace spillway
