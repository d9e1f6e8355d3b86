#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "host/core/histogram.h"
#include "host/core/keyed_hash.h"
#include "host/cpu/kernels.h"
#include "host/cpu/score_pass.h"

namespace spillway {

// Draws the tail's rows, stratum by stratum, by the keyed hash. Looks at bins
// and hashes only, never at a row: so widening a threshold before the rows are
// read biases nothing.
class TailSampler {
 public:
  TailSampler(const ScorePass& scores, const Strata& strata, const SampleOrder& order);

  // Draws about wanted[h] of n_h tokens of each stratum, all where wanted[h]
  // >= n_h. Samples nest: what was drawn stays drawn. Returns the new tokens
  // per stratum, ascending.
  std::vector<std::vector<uint32_t>> Draw(std::span<const int64_t> wanted);
  // Doubles the threshold of every stratum with fewer than `least` tokens
  // until it has as many, or all. Returns the new tokens likewise.
  std::vector<std::vector<uint32_t>> Widen(int64_t least);
  // Forgets what was drawn.
  void Reset();

  // Tokens drawn per stratum.
  std::span<const int64_t> counts() const { return counts_; }

 private:
  std::vector<std::vector<uint32_t>> DrawTo(std::span<const uint64_t> thresholds);
  // Of the tokens between the old thresholds and the new.
  SampleLimits Limits(std::span<const uint64_t> thresholds) const;

  const ScorePass& scores_;
  const Strata& strata_;
  const SampleOrder order_;
  std::vector<uint16_t> first_bin_;  // lowest bin of each stratum
  std::vector<uint64_t> thresholds_;
  std::vector<int64_t> counts_;
};

}  // namespace spillway
