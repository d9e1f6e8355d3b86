#pragma once

#include <limits>
#include <span>
#include <vector>

#include "host/core/estimate.h"
#include "host/core/softmax_sums.h"
#include "host/core/value_code.h"

namespace spillway {

// Sums of one query head over one stratum's sampled rows.
struct StratumSums {
  int64_t token_count = 0;           // n_h
  RowSums sums;                      // over the r_h = sums.count rows drawn; may be empty
  std::span<const float> value;      // [d] sum x v
  std::span<const float> value_sq;   // [d] sum x^2 v
  std::span<const float> projected;  // [kProjectionEntries] sum x^2 y y^T
};

// What codes of keys and values alone give for a head's tail (host/core/value_code.h). If a head
// has them, its strata's sums are over x v - x^ v^ and x - x^ in place of x v and x.
struct CodeSums {
  double reference = 0;                  // sums are in units of exp(reference)
  double sum = 0;                        // sum x^ over the tail
  std::vector<double> value;             // [d] sum x^ v^; empty: the head has none
  std::vector<double> centre;            // [d] sum x^ c, with c the value centre of a token's page
  double centre_square = 0;              // sum x^ ||c||^2
  std::vector<PredictedSums> predicted;  // per stratum

  // The mean of ||c - o||^2 over the tail, weighted by x^. output: o [d].
  double MeanSquareFrom(std::span<const double> output) const;
};

// The estimate of one query head's output, before N^ is divided by D^.
struct HeadEstimate : HeadTotals {
  std::vector<double> numerator;       // [d] N^
  std::vector<StratumSpread> spreads;  // per stratum
};

// exact: sums over sink, window and heavy set. exact_value: [d], their sum x v. signs: [d], +1 or
// -1, of the projection. d is a multiple of kProjectionDims. With codes and before any row is
// drawn, spreads and degrees are the predicted ones. sink: the head's sink logit, which counts as
// an exact row with value 0; -infinity: none.
HeadEstimate EstimateHead(const RowSums& exact, std::span<const float> exact_value,
                          std::span<const StratumSums> strata, std::span<const float> signs,
                          const CodeSums& codes = {},
                          double sink = -std::numeric_limits<double>::infinity());

}  // namespace spillway
