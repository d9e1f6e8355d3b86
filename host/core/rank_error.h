#pragma once

#include <cmath>
#include <cstdint>

#include "host/base/host_device.h"

// The error of estimated logits, computed from codes and query alone: no row is read. The estimate
// f <t, q~> + q.c of a logit q.k has, under a random rotation, the variance
//   sigma^2 = scale^2 f^2 (1 - D)^2 (D / (1 - D) ||q||^2 + ||P q - q~||^2),
// where D is the distortion of the quantiser of the codes, and q~ the quantised query. A head's
// sigma^2 is the mean over its tokens, weighted by their estimated softmax weights e.
namespace spillway {

// Distortion of the quantiser with QuantiserStep() for a standard normal coordinate, at 1 to 4 bits
// (Max 1960).
constexpr double QuantiserDistortion(int bits_per_dim) {
  constexpr double kDistortion[] = {0.3634, 0.1188, 0.03744, 0.01154};
  return kDistortion[bits_per_dim - 1];
}

// sigma^2 / f^2 of a query head. query_norm_sq: ||P q||^2. query_error_sq: ||P q - q~||^2.
SPILLWAY_HOST_DEVICE inline double RankErrorScale(double softmax_scale, double distortion,
                                                  double query_norm_sq, double query_error_sq) {
  const double factor = softmax_scale * (1 - distortion);
  return factor * factor * (distortion / (1 - distortion) * query_norm_sq + query_error_sq);
}

// Sums over tokens for one query head: in fp32 over a page, in fp64 over the pages of a KV head.
// Tokens without a score, and strays, are left out.
template <typename Real>
struct RankSums {
  Real weight;  // sum e
  Real error;   // sum e f^2, f^2 at most kFactorSquareMax
};
inline constexpr float kFactorSquareMax = 3.0e38f;

// The order of a page's sums. Chain j takes tokens j, j + kRankChains, ... one after the other:
// `weight` by additions, `error` by fused multiply-adds. Then chains that are 8, 4, 2, 1 apart are
// added pairwise.
inline constexpr int kRankChains = 16;
template <typename Real>
SPILLWAY_HOST_DEVICE inline Real SumChains(Real* chains, int count = kRankChains) {
  for (int apart = count / 2; apart > 0; apart /= 2) {
    for (int j = 0; j < apart; ++j) chains[j] += chains[j + apart];
  }
  return chains[0];
}
// The order of sums over pages. Chain j takes pages j, j + kRankPageChains, ... of the sequence.
// Then SumChains() adds the chains.
inline constexpr int kRankPageChains = 256;

// sigma^2 of a head; 0 if the weights sum to 0. Infinite or NaN if it cannot be computed.
SPILLWAY_HOST_DEVICE inline double RankVariance(double scale, const RankSums<double>& sums) {
  return sums.weight > 0 ? scale * (sums.error / sums.weight) : 0.0;
}

// Decides whether scores must be computed again with other weights for the heads. 1 / w_h
// (host/core/score.h) is an estimate of the head's sum of e, from a sample; now the sum itself is
// known. A head's share is w_h times its sum. If shares are far apart, tokens of one head displace
// the best tokens of another. Initialise with {}.
struct HeadShares {
  static constexpr double kFarApart = 64;

  bool known;
  bool unusable;  // a share is not finite and positive
  double least, most;
  double least_sum;

  SPILLWAY_HOST_DEVICE void Add(float head_weight, double sum) {
    const double share = static_cast<double>(head_weight) * sum;
    if (!(share > 0) || !(share < HUGE_VAL)) {
      unusable = true;
      return;
    }
    least = known && least < share ? least : share;
    most = known && most > share ? most : share;
    least_sum = known && least_sum < sum ? least_sum : sum;
    known = true;
  }
  SPILLWAY_HOST_DEVICE bool AreFarApart() const {
    return known && !unusable && most > kFarApart * least;
  }
  // The new w_h of a head with this sum. The largest weight is 1, so w_h times e cannot overflow.
  SPILLWAY_HOST_DEVICE float WeightOf(double sum) const {
    return static_cast<float>(least_sum / sum);
  }
};

// The number of heavy tokens, given the largest sigma^2 of the group. The worse the ranks, the more
// heavy tokens are needed, because otherwise tokens with large weights may be in the tail.
inline constexpr int64_t kAdaptiveHeavyMin = 64;
inline constexpr int64_t kAdaptiveHeavyMax = 1024;
SPILLWAY_HOST_DEVICE inline int64_t AdaptiveHeavyCount(double rank_variance) {
  if (rank_variance <= 1.0) return kAdaptiveHeavyMin;
  if (rank_variance <= 1.5 * 1.5) return 128;
  if (rank_variance <= 2.5 * 2.5) return 256;
  if (rank_variance <= 4.0 * 4.0) return 512;
  return kAdaptiveHeavyMax;
}

// Whether ranks with this error are good enough for an error bound.
SPILLWAY_HOST_DEVICE inline bool RanksHold(double rank_variance) {
  return rank_variance <= 6.0 * 6.0;
}

}  // namespace spillway
