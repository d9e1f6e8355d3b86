#pragma once

#include <cstdint>

namespace spillway {

// How the tokens beside sink, window and heavy set are attended: not at all, by
// a uniform sample (vAttention, arXiv 2510.05688), by a stratified one, or by
// LSH sampling (MagicPIG, arXiv 2410.16179).
enum class Tail : uint8_t { kNone, kUniform, kStratified, kLshSampling };
// Whether the plan of host/core/tail_plan.h draws the tail; any other is drawn by
// a method, which bounds no error.
constexpr bool IsPlanned(Tail tail) {
  return tail == Tail::kNone || tail == Tail::kUniform || tail == Tail::kStratified;
}
// What a uniform sample's size is computed from; see budget.h.
enum class Bound : uint8_t { kDenominator, kPaper, kRatio };

// Whether a tail's estimate bounds the output's error: what certificates may
// promise, and what the audit may raise.
constexpr bool BoundsTheError(Tail tail, Bound bound) {
  return tail == Tail::kStratified || (tail == Tail::kUniform && bound != Bound::kDenominator);
}

// Whether what the estimate promises rests on the ranks: the strata, or the rows
// that were left to a uniform tail. vAttention's lemmas hold for any.
constexpr bool RestsOnRanks(Tail tail, Bound bound) {
  return tail == Tail::kStratified || (tail == Tail::kUniform && bound == Bound::kRatio);
}

// What one (query, KV head) asks of its tail, every number resolved. Made with
// {}, so that what is not set is 0.
struct TailTerms {
  Tail tail;
  Bound bound;          // kUniform only
  bool may_promise;     // if the estimate is within epsilon
  int32_t pilot_count;  // rows a stratum
  double epsilon;
  double z;            // Phi^-1(1 - delta / 2)
  double one_sided_z;  // Phi^-1(1 - delta)
  double bound_z;      // BoundQuantile(bound, delta)
  double inflation;
  // Rows that sink, window, heavy set and tail may number; 0: no limit.
  int64_t row_count_max;
};

}  // namespace spillway
