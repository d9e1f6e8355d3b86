#pragma once

#include <cstdint>

namespace spillway {

// How the tokens other than sink, window and heavy set are attended: not at all, by a uniform
// sample (vAttention, arXiv 2510.05688), by a stratified sample, or by LSH sampling (MagicPIG,
// arXiv 2410.16179).
enum class Tail : uint8_t { kNone, kUniform, kStratified, kLshSampling };
// Whether the tail is sampled as in host/core/tail_plan.h. Any other tail is sampled by an optional
// method, which gives no error bound.
constexpr bool IsPlanned(Tail tail) {
  return tail == Tail::kNone || tail == Tail::kUniform || tail == Tail::kStratified;
}
// The formula for the size of a uniform sample; see budget.h.
enum class Bound : uint8_t { kDenominator, kPaper, kRatio };

// Whether the tail's estimate bounds the error of the output. Only then may certificates promise an
// error, and only then may the audit give a head more rows.
constexpr bool BoundsTheError(Tail tail, Bound bound) {
  return tail == Tail::kStratified || (tail == Tail::kUniform && bound != Bound::kDenominator);
}

// Whether the error bound relies on good ranks: for a stratified tail because ranks form the
// strata, for a uniform tail with kRatio because it relies on the heavy tokens being found. The
// bound of vAttention's lemmas does not depend on ranks.
constexpr bool RestsOnRanks(Tail tail, Bound bound) {
  return tail == Tail::kStratified || (tail == Tail::kUniform && bound == Bound::kRatio);
}

// How the tail of one (query, group) is sampled, with all defaults resolved. Initialise with {},
// so that unset members are 0.
struct TailTerms {
  Tail tail;
  Bound bound;          // kUniform only
  bool may_promise;     // whether an estimate within epsilon gives a bound
  int32_t pilot_count;  // rows per stratum
  double epsilon;
  double z;            // Phi^-1(1 - delta / 2)
  double one_sided_z;  // Phi^-1(1 - delta)
  double bound_z;      // BoundQuantile(bound, delta)
  double inflation;
  // Maximum number of rows of sink, window, heavy set and tail together; 0: no limit.
  int64_t row_count_max;
};

}  // namespace spillway
