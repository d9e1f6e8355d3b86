#pragma once

#include <cstdint>
#include <vector>

#include "host/cpu/kernels.h"
#include "host/cpu/key_scorer.h"

namespace spillway {

// Scores keys by the bits of their codes that match the queries', summed over
// the group: a bin per count.
class HammingScorer final : public KeyScorer {
 public:
  explicit HammingScorer(const ScoredKeys& keys);

  absl::Status Prepare() override;
  int bin_count() const override { return keys_.spec().match_bin_count(); }
  absl::Status Bins(int64_t page, int tile_begin, int tile_end, uint16_t* bins,
                    uint16_t* const* head_bins) const override;

 private:
  // Adds the query heads' codes to their count of ones per bit of a key's code.
  void CountMlpBits(std::vector<int>& ones) const;
  void CountRotationBits(std::vector<int>& ones) const;
  // A page's codes; null beyond the last.
  const std::byte* Codes(int64_t page) const;

  const ScoredKeys keys_;
  int64_t offset_bytes_ = 0;  // of the codes in an index page
  std::vector<int8_t> weights_;
  ScoreQuery query_;
};

}  // namespace spillway
