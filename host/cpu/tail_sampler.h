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
// by a row. Everything that it is made from outlives it. One thread calls it.
class TailSampler {
 public:
  TailSampler(const ScorePass& scores, const Strata& strata, const SampleOrder& order)
      : scores_(scores), strata_(strata), order_(order), collected_(strata.size(), 0) {}

  // Per stratum the tokens whose places lie in [low[h], high[h]), ascending;
  // low[h] <= high[h] <= 2^32.
  std::vector<std::vector<uint32_t>> Draw(std::span<const uint64_t> low,
                                          std::span<const uint64_t> high);

 private:
  struct Candidate {
    uint32_t token;
    uint32_t stratum;
    uint64_t place;
  };

  // Makes candidates of all tokens whose places lie below collected_.
  void Collect();
  SampleLimits Limits() const;

  const ScorePass& scores_;
  const Strata& strata_;
  const SampleOrder order_;
  std::vector<uint64_t> collected_;                 // per stratum
  std::vector<std::vector<Candidate>> candidates_;  // per block
};

}  // namespace spillway
