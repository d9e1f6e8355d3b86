#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "tests/reference/attention.h"
#include "tests/reference/ranking.h"

namespace spillway::reference {

// A vector in Twilight's 4-bit form (arXiv 2502.02770, appendix B.1): scale =
// (max - min) / 15, zero = min, both kept in fp16, q = clamp(round((x - zero) /
// scale), 0, 15); x is about zero + scale q.
struct Int4Vector {
  std::vector<int> levels;
  double zero = 0;
  double scale = 0;
  // The smallest distance of an (x - zero) / scale to a rounding border, exact ties excepted, and
  // the distance of the scale to a rounding border of fp16, as a fraction.
  double border_distance = 0;
  double scale_margin = 0;
};
Int4Vector QuantiseInt4(std::span<const double> x);

// sum_i q_i x_i of the 4-bit form. With only a key's chosen channels, this is Double Sparsity's
// label estimate (arXiv 2408.07092, section 3.2).
double Int4Dot(const Int4Vector& x, std::span<const double> q);

// The elements of x that the channels name.
std::vector<double> Chosen(std::span<const double> x, std::span<const int> channels);

// For each of the first n keys, scale times Quest's upper bound of q.k in the key's page (arXiv
// 2406.10774, algorithm 1): sum_c max(q_c min_c, q_c max_c). The last page may be incomplete.
std::vector<double> PageBounds(const KeyValues& kv, std::span<const double> q, double scale,
                               int64_t page_token_count, int64_t n);

// The probability that a key at this cosine to the query shares at least two of table_count buckets
// of `bits` signs each (MagicPIG, arXiv 2410.16179, section 4.2): p = (1 - acos(cosine) / pi)^bits,
// 1 - (1 - p)^L - L p (1 - p)^(L - 1).
double TwoHitProbability(double cosine, int bits, int table_count);

// The projections of x onto the columns of `projections`, [d][count] row-major.
std::vector<double> Projected(std::span<const double> x, std::span<const float> projections);
// The number of tables, of `bits` projections each, in which key and query have equal signs. In
// fp32, a projection closer to 0 than its tolerance may have either.
BinRange SharedBuckets(std::span<const double> key, double key_tolerance,
                       std::span<const double> query, double query_tolerance, int bits);

// Attention in which each sampled row stands for 1 / (probability + 1e-4) rows, as in MagicPIG's
// released code, and exact rows have weight 1. tail_mass: the share of the softmax mass that the
// sampled rows have.
struct SampledAttention {
  Attention attention;
  double tail_mass = 0;
};
SampledAttention AttendSampled(const KeyValues& kv, std::span<const double> q, double scale,
                               std::span<const uint32_t> exact, std::span<const uint32_t> sampled,
                               std::span<const double> probabilities);

// An MLP with SiLU units; the signs of its output are a code. weights: [in][out]. With three
// layers, it is HashAttention's (github.com/xAlg-ai/HashAttention-1.0).
struct HashMlp {
  struct Layer {
    std::vector<float> weights;
    std::vector<float> bias;
  };
  std::vector<Layer> layers;

  std::vector<double> Output(std::span<const double> x) const;
};

}  // namespace spillway::reference
