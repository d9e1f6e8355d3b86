#pragma once

#include <cmath>

#include "host/base/host_device.h"

namespace spillway {

// A key is sampled if it shares at least this many buckets with the query.
inline constexpr int kLshSharedMin = 2;
// The logit of a row for a query head that does not take the row. It is so low that the row has no
// weight beside any other.
inline constexpr float kLshNotTaken = -1e30f;

// log(P + 1e-4), where P is the probability that a key and a query share at least two of
// table_count buckets of `bits` signs each. Their angle is acos(dot / (query_norm key_norm)). The
// 1e-4 keeps weights of distant keys finite (MagicPIG, arXiv 2410.16179, section 4.2, and its
// released code: p = (1 - angle / pi)^bits, P = 1 - (1 - p)^L - L p (1 - p)^(L-1)). A vector of
// length 0 counts as orthogonal to all others. The result is subtracted from a sampled key's logit.
SPILLWAY_HOST_DEVICE inline double LshLogWeight(double dot, double query_norm, double key_norm,
                                                int bits, int table_count) {
  constexpr double kPi = 3.14159265358979323846;
  constexpr double kLeast = 1e-4;
  const double lengths = query_norm * key_norm;
  // Rounding may give a cosine outside [-1, 1], for which acos() is NaN.
  const double cosine = lengths > 0 ? ::fmin(::fmax(dot / lengths, -1.0), 1.0) : 0.0;
  const double p = ::pow(1 - ::acos(cosine) / kPi, bits);
  const double miss = ::pow(1 - p, table_count - 1);  // probability to miss all tables but one
  return ::log(1 - (1 - p) * miss - table_count * p * miss + kLeast);
}

}  // namespace spillway
