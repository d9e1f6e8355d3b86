#pragma once

#include <cstdint>
#include <span>
#include <vector>

namespace spillway::reference {

// Bits 30..19 of a non-negative fp32 score.
int ScoreBin(double score);

// 2^((l - M) log2(e)), the exponent cut to [-90, 80], of one query head's logits, by token, from
// `begin` to the end; M is the largest logit of a sample: every s-th page of 128 tokens, counted
// from the page of `begin`, s a sixteenth of the pages, rounded down, in [1, 64]. Tokens that are
// left out are no part of the sample; empty: none. centres: logits of the centres of all pages,
// from token 0 on, which belong to the sample, those of pages with tokens from begin to the end;
// empty: none.
std::vector<double> HeadScores(std::span<const double> logits, int64_t begin, int64_t end,
                               const std::vector<bool>& left_out = {},
                               std::span<const double> centres = {});
// The group's: the sum over its heads, each divided by its sum over the sample,
// centres counted twice. With centres: where the sums over all tokens that are not
// left out, divided likewise, lie a factor above 64 apart, each is instead
// multiplied by the least such sum of a head and divided by its own.
std::vector<double> GroupScores(std::span<const std::vector<double>> logits, int64_t begin,
                                int64_t end, const std::vector<bool>& left_out = {},
                                std::span<const std::vector<double>> centres = {});

// The bins that a score may have: one where it is known exactly, a range where
// fp32 may fall either way.
struct BinRange {
  int low = 0;
  int high = 0;
};
BinRange RangeOf(double score, double relative_tolerance);

// Whether a token is among the k with the largest bins, the most recent first
// among equals, given only ranges of the bins.
enum class Membership : uint8_t { kIn, kOut, kOpen };
std::vector<Membership> TopK(std::span<const BinRange> bins, int64_t k);

// The k tokens (positions, ascending) with the largest bins; ties go to the
// most recent.
std::vector<int64_t> ExactTopK(std::span<const int> bins, int64_t k);

// The fewest tokens of falling bin whose mass, each at its bin's centre, is at
// least `mass` of the total, no fewer than floor, no more than ceiling; ties go
// to the most recent.
std::vector<int64_t> ExactTopP(std::span<const int> bins, double mass, int64_t floor,
                               int64_t ceiling);

// Tail tokens cut into strata by falling bin: a stratum ends at the first bin
// border where the rank reaches the next of 2k, 4k, ...; once less than a
// tenth of the tail is left, that is the last one. bins: of the tail tokens.
// Returns the stratum of each.
std::vector<int> CutIntoStrata(std::span<const int> bins, int64_t k);

}  // namespace spillway::reference
