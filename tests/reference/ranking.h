#pragma once

#include <cstdint>
#include <span>
#include <vector>

namespace spillway::reference {

// Bits 30..19 of a non-negative fp32 score.
int ScoreBin(double score);

// The scores of one query head, by token, from `begin` to `end`: 2^((l - M) log2(e)), with the
// exponent limited to [-90, 80].
// l: the logits. M: the largest logit of a sample, which is every s-th page of 128 tokens, counted
// from the page of `begin`; s is a sixteenth of the pages, rounded down, within [1, 64].
// left_out: tokens that are not in the sample; empty: none. centres: logits of the centres of all
// pages, from token 0 on. Those of pages with tokens from `begin` to `end` belong to the sample;
// empty: none.
std::vector<double> HeadScores(std::span<const double> logits, int64_t begin, int64_t end,
                               const std::vector<bool>& left_out = {},
                               std::span<const double> centres = {});
// The scores of the group: the sum over its heads, each divided by its sum over the sample, in
// which centres count twice. With centres: if the heads' sums over all tokens that are not left
// out, divided likewise, differ by a factor above 64, each head is instead multiplied by the
// smallest of these sums and divided by its own.
std::vector<double> GroupScores(std::span<const std::vector<double>> logits, int64_t begin,
                                int64_t end, const std::vector<bool>& left_out = {},
                                std::span<const std::vector<double>> centres = {});

// The bins that a score may have: one bin if it is known exactly, a range if fp32 may give either.
struct BinRange {
  int low = 0;
  int high = 0;
};
BinRange RangeOf(double score, double relative_tolerance);

// Whether a token is among the k with the largest bins, given only ranges of the bins. Among equal
// bins, the most recent comes first.
enum class Membership : uint8_t { kIn, kOut, kOpen };
std::vector<Membership> TopK(std::span<const BinRange> bins, int64_t k);

// The k tokens (positions, ascending) with the largest bins; ties go to the
// most recent.
std::vector<int64_t> ExactTopK(std::span<const int> bins, int64_t k);

// The fewest tokens, by falling bin, with at least `mass` of the total mass, within floor and
// ceiling. A token's mass is that of its bin's centre. Ties go to the most recent.
std::vector<int64_t> ExactTopP(std::span<const int> bins, double mass, int64_t floor,
                               int64_t ceiling);

// Cuts the tokens of a tail into strata by falling bin. A stratum ends at the first bin border
// where the rank reaches the next of 2k, 4k, ...; once less than a tenth of the tail is left, the
// rest is the last. bins: of the tail's tokens. Returns the stratum of each.
std::vector<int> CutIntoStrata(std::span<const int> bins, int64_t k);

}  // namespace spillway::reference
