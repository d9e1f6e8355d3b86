#pragma once

#include <cstdint>

#include "host/base/limits.h"
#include "host/core/keyed_hash.h"

// The draws of a tail's sample: first the pilot, then the further rows that the budgets need, and a
// third draw if a head's error is too large. A draw takes the tokens whose places lie between two
// thresholds. Their number is known only after counting. So each draw is judged before any of its
// rows is read: a stratum with too few rows for a variance is drawn again with a higher threshold,
// and a draw above the limit of row_count_max is made smaller. These decisions depend on bins and
// hashes alone, so they do not bias the estimate.
namespace spillway {

// The state of the draws, per stratum. Initialise with {}.
struct TailDraw {
  int strata;
  bool limited;   // row_count_max limited the sample
  bool given_up;  // not even a pilot fits; nothing is drawn
  int64_t rows_left;
  int64_t token_count[kTailStrataMax];       // n_h
  int64_t drawn[kTailStrataMax];             // rows of the previous draws
  int64_t wanted[kTailStrataMax];            // the pilot's rows, then the budget
  uint64_t drawn_threshold[kTailStrataMax];  // of the previous draws
  uint64_t threshold[kTailStrataMax];        // of this draw, at least as high
};

enum class DrawVerdict : int { kTake, kDrawAgain };

// Judges a pilot, or a first draw of predicted budgets. counts[h]: number of tokens below the
// threshold of stratum h. If the result is kDrawAgain, the thresholds have been changed.
// rows_min: rows that a stratum needs, if it has as many. sixteenths: how much of a draw above the
// limit remains.
SPILLWAY_HOST_DEVICE inline DrawVerdict JudgePilot(const int64_t* counts, TailDraw& draw,
                                                   int64_t rows_min = kStratumRowsMin,
                                                   int sixteenths = 12) {
  if (draw.strata == 0 || draw.rows_left == 0 || draw.given_up) return DrawVerdict::kTake;
  constexpr uint64_t kAll = uint64_t{1} << 32;
  bool wider = false;
  int64_t total = 0;
  for (int h = 0; h < draw.strata; ++h) {
    total += counts[h];
    const int64_t least = draw.token_count[h] < rows_min ? draw.token_count[h] : rows_min;
    if (counts[h] >= least) continue;
    const uint64_t twice = 2 * (draw.threshold[h] > 1 ? draw.threshold[h] : 1);
    draw.threshold[h] = twice < kAll ? twice : kAll;
    wider = true;
  }
  if (wider) return DrawVerdict::kDrawAgain;
  if (total <= draw.rows_left) return DrawVerdict::kTake;
  draw.limited = true;
  int64_t largest = 0;
  for (int h = 0; h < draw.strata; ++h) {
    const int64_t less = draw.wanted[h] * sixteenths / 16;
    draw.wanted[h] = less > 1 ? less : 1;
    if (draw.wanted[h] > largest) largest = draw.wanted[h];
  }
  draw.given_up = largest == 1;
  for (int h = 0; h < draw.strata; ++h) {
    draw.threshold[h] = draw.given_up ? 0 : SampleThreshold(draw.wanted[h], draw.token_count[h]);
  }
  return DrawVerdict::kDrawAgain;
}

// The threshold for a stratum's budget of `wanted` rows. It is never below drawn_threshold, so rows
// already drawn remain in the sample.
SPILLWAY_HOST_DEVICE inline uint64_t BudgetThreshold(int64_t wanted, int64_t token_count,
                                                     uint64_t drawn_threshold) {
  const uint64_t threshold = SampleThreshold(wanted, token_count);
  return threshold > drawn_threshold ? threshold : drawn_threshold;
}
SPILLWAY_HOST_DEVICE inline uint64_t BudgetThreshold(const TailDraw& draw, int h) {
  return BudgetThreshold(draw.wanted[h], draw.token_count[h], draw.drawn_threshold[h]);
}

// Judges a first draw of predicted budgets: of a draw above the limit, 15/16 remain. A stratum is
// drawn again only if it has fewer rows than kFirstRowsMin: variances that predictions support can
// rest on few rows.
inline constexpr int64_t kFirstRowsMin = kStratumRowsMin / 2;
SPILLWAY_HOST_DEVICE inline DrawVerdict JudgeFirst(const int64_t* counts, TailDraw& draw) {
  return JudgePilot(counts, draw, kFirstRowsMin, 15);
}
// Up to which threshold the filter of a first draw collects tokens, so that a stratum that is drawn
// again is not filtered again. wanted: its budget.
SPILLWAY_HOST_DEVICE inline uint64_t CollectedThreshold(int64_t wanted, uint64_t threshold) {
  constexpr uint64_t kAll = uint64_t{1} << 32;
  if (wanted > 4 * kStratumRowsMin) return threshold;
  return 2 * threshold < kAll ? 2 * threshold : kAll;
}

// Judges a later draw. counts[h]: number of tokens that it adds to stratum h. Changes thresholds
// like JudgePilot().
SPILLWAY_HOST_DEVICE inline DrawVerdict JudgeSample(const int64_t* counts, TailDraw& draw) {
  int64_t total = 0;
  for (int h = 0; h < draw.strata; ++h) total += draw.drawn[h] + counts[h];
  if (total <= draw.rows_left) return DrawVerdict::kTake;
  draw.limited = true;
  bool smaller = false;
  for (int h = 0; h < draw.strata; ++h) {
    const int64_t less = draw.wanted[h] * 15 / 16;
    const int64_t next = less > draw.drawn[h] ? less : draw.drawn[h];
    smaller |= next < draw.wanted[h];
    draw.wanted[h] = next;
  }
  for (int h = 0; h < draw.strata; ++h) {
    draw.threshold[h] = smaller ? BudgetThreshold(draw, h) : draw.drawn_threshold[h];
  }
  return DrawVerdict::kDrawAgain;
}

}  // namespace spillway
