#pragma once

#include <cmath>

#include "host/core/host_device.h"

namespace spillway {

// A key is sampled if it shares at least this many of its buckets with the query.
inline constexpr int kLshSharedMin = 2;
// The logit of a row for a query head that does not take it: beside it every
// other weighs all.
inline constexpr float kLshNotTaken = -1e30f;

// log of the chance that a key shares at least two of table_count buckets of
// bits signs each with a query at the angle acos(dot / (query_norm key_norm)),
// and 1e-4, which keeps weights of far keys finite (MagicPIG, arXiv 2410.16179,
// section 4.2, and its released code: p = (1 - angle / pi)^bits,
// 1 - (1 - p)^L - L p (1 - p)^(L-1)). Vectors of no length are at right angles
// to all. A sampled key's logit is lessened by it.
SPILLWAY_HOST_DEVICE inline double LshLogWeight(double dot, double query_norm, double key_norm,
                                                int bits, int table_count) {
  constexpr double kPi = 3.14159265358979323846;
  constexpr double kLeast = 1e-4;
  const double lengths = query_norm * key_norm;
  // Rounding may bring it beyond 1, where acos() is no number.
  const double cosine = lengths > 0 ? ::fmin(::fmax(dot / lengths, -1.0), 1.0) : 0.0;
  const double p = ::pow(1 - ::acos(cosine) / kPi, bits);
  const double miss = ::pow(1 - p, table_count - 1);  // of all tables but one
  return ::log(1 - (1 - p) * miss - table_count * p * miss + kLeast);
}

}  // namespace spillway
