#pragma once

#include <cstdint>

#include "host/base/limits.h"
#include "host/core/keyed_hash.h"

// The draws of a tail's sample: the pilot, what the budgets ask for beyond it, and
// a third where a head's error came out too large. A draw takes the tokens whose places lie
// between two thresholds; how many these are is known only once they are
// counted, and so a draw is judged before a row of it is read: a stratum with
// too few rows to estimate a variance from is drawn wider, a draw above what
// row_count_max leaves is made smaller. Bins and hashes alone decide, so that
// nothing of this biases the estimate.
namespace spillway {

// What a draw is judged by and turns over, per stratum. Made with {}.
struct TailDraw {
  int strata;
  bool limited;   // row_count_max bound
  bool given_up;  // no pilot fits: nothing is drawn
  int64_t rows_left;
  int64_t token_count[kTailStrataMax];       // n_h
  int64_t drawn[kTailStrataMax];             // rows of the draws before
  int64_t wanted[kTailStrataMax];            // the pilot's rows, then the budget
  uint64_t drawn_threshold[kTailStrataMax];  // of the draws before
  uint64_t threshold[kTailStrataMax];        // of this one, at least as high
};

enum class DrawVerdict : int { kTake, kDrawAgain };

// Of a pilot that found counts[h] tokens below the thresholds. kDrawAgain has
// set other thresholds.
SPILLWAY_HOST_DEVICE inline DrawVerdict JudgePilot(const int64_t* counts, TailDraw& draw) {
  if (draw.strata == 0 || draw.rows_left == 0 || draw.given_up) return DrawVerdict::kTake;
  constexpr uint64_t kAll = uint64_t{1} << 32;
  bool wider = false;
  int64_t total = 0;
  for (int h = 0; h < draw.strata; ++h) {
    total += counts[h];
    const int64_t least =
        draw.token_count[h] < kStratumRowsMin ? draw.token_count[h] : kStratumRowsMin;
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
    const int64_t less = draw.wanted[h] * 3 / 4;
    draw.wanted[h] = less > 1 ? less : 1;
    if (draw.wanted[h] > largest) largest = draw.wanted[h];
  }
  draw.given_up = largest == 1;
  for (int h = 0; h < draw.strata; ++h) {
    draw.threshold[h] = draw.given_up ? 0 : SampleThreshold(draw.wanted[h], draw.token_count[h]);
  }
  return DrawVerdict::kDrawAgain;
}

// The threshold of a stratum's budget of `wanted` rows: what is drawn stays drawn.
SPILLWAY_HOST_DEVICE inline uint64_t BudgetThreshold(int64_t wanted, int64_t token_count,
                                                     uint64_t drawn_threshold) {
  const uint64_t threshold = SampleThreshold(wanted, token_count);
  return threshold > drawn_threshold ? threshold : drawn_threshold;
}
SPILLWAY_HOST_DEVICE inline uint64_t BudgetThreshold(const TailDraw& draw, int h) {
  return BudgetThreshold(draw.wanted[h], draw.token_count[h], draw.drawn_threshold[h]);
}

// Of a later draw, which found counts[h] more tokens; likewise.
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
