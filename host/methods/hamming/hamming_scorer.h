#pragma once

#include <cstdint>
#include <vector>

#include "host/cpu/kernels.h"
#include "host/cpu/key_scorer.h"

namespace spillway {

// Scores keys by the number of bits of their codes that match the queries' codes, summed over the
// group. Each count is one bin.
class HammingScorer final : public KeyScorer {
 public:
  explicit HammingScorer(const ScoredKeys& keys);

  absl::Status Prepare() override;
  int bin_count() const override { return keys_.spec().match_bin_count(); }
  absl::Status Bins(int64_t page, int tile_begin, int tile_end, uint16_t* bins,
                    uint16_t* const* head_bins) const override;

 private:
  // Counts, for each bit of a key's code, the query heads whose code has a 1; adds this to `ones`.
  void CountMlpBits(std::vector<int>& ones) const;
  void CountRotationBits(std::vector<int>& ones) const;
  // The codes of a page; null beyond the last page.
  const std::byte* Codes(int64_t page) const;

  const ScoredKeys keys_;
  int64_t offset_bytes_ = 0;  // of the codes, in an index page
  std::vector<int8_t> weights_;
  ScoreQuery query_;
};

}  // namespace spillway
