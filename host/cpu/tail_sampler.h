#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "host/core/histogram.h"
#include "host/core/keyed_hash.h"
#include "host/cpu/kernels.h"
#include "host/cpu/score_pass.h"

namespace spillway {

// Finds the tokens of the tail that thresholds draw, from bins and hashes alone: it reads no rows.
// scores and strata must outlive it. One thread at a time.
class TailSampler {
 public:
  TailSampler(const ScorePass& scores, const Strata& strata, const SampleOrder& order)
      : scores_(scores), strata_(strata), order_(order), collected_(strata.size(), 0) {}

  // For each stratum, the tokens whose places are in [low[h], high[h]), ascending. REQUIRES: low[h]
  // <= high[h] <= 2^32.
  std::vector<std::vector<uint32_t>> Draw(std::span<const uint64_t> low,
                                          std::span<const uint64_t> high);

 private:
  struct Candidate {
    uint32_t token;
    uint32_t stratum;
    uint64_t place;
  };

  // Makes candidates of all tokens whose places are below collected_.
  void Collect();
  SampleLimits Limits() const;

  const ScorePass& scores_;
  const Strata& strata_;
  const SampleOrder order_;
  std::vector<uint64_t> collected_;                 // per stratum
  std::vector<std::vector<Candidate>> candidates_;  // per block
};

}  // namespace spillway
