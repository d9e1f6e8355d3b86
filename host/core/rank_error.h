#pragma once

#include <cmath>
#include <cstdint>

#include "host/core/host_device.h"

// How far off estimated logits are, by what is known of codes and query alone:
// no row is read. The estimate f <t, q~> + q.c of a logit q.k has, with a random
// rotation, the variance
//   sigma^2 = scale^2 f^2 (1 - D)^2 (D / (1 - D) ||q||^2 + ||P q - q~||^2),
// D the distortion of the codes' quantiser, q~ the query's. A head's is the mean
// of its tokens', each by its estimated softmax weight e.
namespace spillway {

// Distortion of QuantiserStep() for a standard normal coordinate, at 1 to 4 bits
// (Max 1960).
constexpr double QuantiserDistortion(int bits_per_dim) {
  constexpr double kDistortion[] = {0.3634, 0.1188, 0.03744, 0.01154};
  return kDistortion[bits_per_dim - 1];
}

// sigma^2 / f^2 of a query head. query_norm_sq: ||P q||^2; query_error_sq:
// ||P q - q~||^2.
SPILLWAY_HOST_DEVICE inline double RankErrorScale(double softmax_scale, double distortion,
                                                  double query_norm_sq, double query_error_sq) {
  const double factor = softmax_scale * (1 - distortion);
  return factor * factor * (distortion / (1 - distortion) * query_norm_sq + query_error_sq);
}

// Sums over tokens for one query head: of a page in fp32, as PageRankSums says,
// of a KV head in fp64. Tokens that have no score, and strays, add nothing.
template <typename Real>
struct RankSums {
  Real weight;  // sum e
  Real error;   // sum e f^2, f^2 at most kFactorSquareMax
};
inline constexpr float kFactorSquareMax = 3.0e38f;

// The order of a page's sums: chain j takes tokens j, j + kRankChains, ... in
// turn, by an addition and by a fused multiply-add; then chains are added in
// pairs that lie 8, 4, 2, 1 apart.
inline constexpr int kRankChains = 16;
template <typename Real>
SPILLWAY_HOST_DEVICE inline Real SumChains(Real* chains, int count = kRankChains) {
  for (int apart = count / 2; apart > 0; apart /= 2) {
    for (int j = 0; j < apart; ++j) chains[j] += chains[j + apart];
  }
  return chains[0];
}
// The order of sums over pages: chain j takes pages j, j + kRankPageChains, ... of
// the sequence; then chains are added in pairs that lie half of their number
// apart, and so on.
inline constexpr int kRankPageChains = 256;

// sigma^2 of a head; 0 without weight. Not a number where it cannot be said.
SPILLWAY_HOST_DEVICE inline double RankVariance(double scale, const RankSums<double>& sums) {
  return sums.weight > 0 ? scale * (sums.error / sums.weight) : 0.0;
}

// Whether heads' scores must be weighted anew: 1 / w_h (host/core/score.h) is what
// a sample says of a head's sum of e, and now the sum is known. If a head's share,
// w_h times its sum, is far from another's, one head's tokens pass over the
// other's best. Made with {}.
struct HeadShares {
  static constexpr double kFarApart = 64;

  bool known;
  bool unusable;  // a share is no positive number
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
  // w_h of a head's sum, the largest being 1: no product of the head's e leaves
  // the normal numbers.
  SPILLWAY_HOST_DEVICE float WeightOf(double sum) const {
    return static_cast<float>(least_sum / sum);
  }
};

// How many tokens are heavy, by the largest sigma^2 of the group: the worse
// the ranks, the more are needed for the tail to be without surprises.
inline constexpr int64_t kAdaptiveHeavyMin = 64;
inline constexpr int64_t kAdaptiveHeavyMax = 1024;
SPILLWAY_HOST_DEVICE inline int64_t AdaptiveHeavyCount(double rank_variance) {
  if (rank_variance <= 1.0) return kAdaptiveHeavyMin;
  if (rank_variance <= 1.5 * 1.5) return 128;
  if (rank_variance <= 2.5 * 2.5) return 256;
  if (rank_variance <= 4.0 * 4.0) return 512;
  return kAdaptiveHeavyMax;
}

// Whether ranks of this error may carry a promise.
SPILLWAY_HOST_DEVICE inline bool RanksHold(double rank_variance) {
  return rank_variance <= 6.0 * 6.0;
}

}  // namespace spillway
