#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "host/core/histogram.h"
#include "host/core/keyed_hash.h"
#include "host/cpu/kernels.h"
#include "host/cpu/score_pass.h"

namespace spillway {

// Finds the tail's tokens that thresholds draw, by bins and hashes alone, never
// by a row. Everything that it is made from outlives it. Thread-safe.
class TailSampler {
 public:
  TailSampler(const ScorePass& scores, const Strata& strata, const SampleOrder& order)
      : scores_(scores), strata_(strata), order_(order) {}

  // Per stratum the tokens whose places lie in [low[h], high[h]), ascending;
  // low[h] <= high[h] <= 2^32.
  std::vector<std::vector<uint32_t>> Draw(std::span<const uint64_t> low,
                                          std::span<const uint64_t> high) const;

 private:
  SampleLimits Limits(std::span<const uint64_t> low, std::span<const uint64_t> high) const;

  const ScorePass& scores_;
  const Strata& strata_;
  const SampleOrder order_;
};

}  // namespace spillway
