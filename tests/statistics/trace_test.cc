// The data of the statistical tests have the properties that they claim.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <string>
#include <vector>

#include "tests/statistics/experiment.h"

namespace spillway {
namespace {

TEST(Trace, HasTheStatisticsOfRealAttention) {
  Experiment e;
  double mass_sum = 0, effective_sum = 0, alignment_sum = 0, kurtosis_sum = 0;
  int count = 0;
  for (int h = 0; h < e.spec.query_head_count; ++h) {
    const reference::KeyValues kv = e.context.Head(h / e.kGroup);
    for (int t = 0; t < e.kQueries; ++t) {
      std::vector<double> logits = reference::Logits(kv, reference::Query(e.spec, e.q, t, h),
                                                     e.spec.softmax_scale, e.kTokens);
      double mean = 0, second = 0, fourth = 0;
      for (double l : logits) mean += l / e.kTokens;
      for (double l : logits) {
        second += std::pow(l - mean, 2) / e.kTokens;
        fourth += std::pow(l - mean, 4) / e.kTokens;
      }
      std::sort(logits.begin(), logits.end(), std::greater<>());
      double total = 0, weighted = 0, top = 0;
      for (size_t i = 0; i < logits.size(); ++i) {
        const double x = std::exp(logits[i] - logits[0]);
        total += x;
        weighted += x * (logits[i] - logits[0]);
        if (i < 256) top += x;
      }
      mass_sum += top / total;
      // The effective number of tokens is exp of the entropy.
      effective_sum += std::exp(std::log(total) - weighted / total);
      kurtosis_sum += fourth / (second * second);
      const std::vector<double>& out = e.exact[t * e.spec.query_head_count + h].out;
      double spread = 0;
      for (double v : kv.v) spread += v * v / e.kTokens;
      alignment_sum += reference::Norm(out) / std::sqrt(spread);
      ++count;
    }
  }
  const double mass = mass_sum / count, effective = effective_sum / count;
  const double alignment = alignment_sum / count, kurtosis = kurtosis_sum / count;
  std::printf(
      "top 256 of 8192 hold %.3f of the mass; %.0f effective tokens; logits' kurtosis "
      "%.2f; ||o|| / rms ||v|| %.2f\n",
      mass, effective, kurtosis, alignment);
  RecordProperty("top_256_mass", std::to_string(mass));
  RecordProperty("effective_tokens", std::to_string(effective));
  // Few tokens have a large share, but the others have too much to be left out.
  EXPECT_GT(mass, 0.25);
  EXPECT_LT(mass, 0.75);
  EXPECT_GT(effective, 1000);
  EXPECT_LT(effective, 4000);
  // The tails are heavier than normal.
  EXPECT_GT(kurtosis, 3.3);
  // Outputs do not cancel to zero.
  EXPECT_GT(alignment, 0.3);
}

}  // namespace
}  // namespace spillway
