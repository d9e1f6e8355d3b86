#pragma once

#include <algorithm>
#include <cstdint>
#include <optional>
#include <vector>

#include "absl/status/status.h"
#include "host/core/histogram.h"
#include "host/core/tail_plan.h"
#include "host/cpu/attend_context.h"
#include "host/cpu/key_scorer.h"

namespace spillway {

// Scores of the tokens of one (query, group), kept as histogram bins. Tokens are split into
// blocks at multiples of kBlockTokens, whatever the number of threads.
class ScorePass {
 public:
  static constexpr int64_t kBlockTokens = 16384;

  // selector: the one that scores, the policy's or that of its first selection. by_mass: also keeps
  // the bins of each query head, for top-p. with_levels: also keeps the levels of x^.
  ScorePass(const ScoredKeys& keys, Selector selector, bool by_mass, bool with_levels = false);

  // Prepares the scorer, and fills the bins and the histogram with its scores. Called once.
  // RESOURCE_EXHAUSTED, CANCELLED, and errors of the scorer.
  absl::Status Score(KeyScorer& scorer);
  // The `count` tokens of the highest bins, ascending; of equal bins the most recent tokens. All
  // tokens, if there are fewer.
  std::vector<uint32_t> Highest(int64_t count) const;
  bool by_mass() const { return by_mass_; }
  // Number of strays among the scored tokens.
  int64_t stray_count() const { return weighs_ ? histogram_[kStrayBin] : 0; }
  // The levels of x^ of the tail, [page][G][kPageTokenCount] from the first scored token's page on:
  // 0 for heavy tokens once TakeHeavy() has returned. Null if the scorer does not write them.
  const uint8_t* levels() const {
    return level_terms_.references == nullptr ? nullptr : workspace_->levels.data();
  }
  const LevelTerms& level_terms() const { return level_terms_; }
  // Position in levels() of a token's level for query head g.
  int64_t LevelAt(int64_t token, int g) const {
    const int64_t page = token / kPageTokenCount - first_page();
    return (page * keys_.spec().group() + g) * kPageTokenCount + token % kPageTokenCount;
  }
  int64_t first_page() const { return begin_ / kPageTokenCount; }
  int64_t page_count() const { return (end_ - 1) / kPageTokenCount - first_page() + 1; }
  // Chooses the heavy set, by the policy's mass or by count, and the strays. Marks all these tokens
  // in the bins, takes them out of the histogram, and returns them ascending.
  std::vector<uint32_t> TakeHeavy(const HeavySet& set);

  // Tokens per group bin; after TakeHeavy() only those of the tail.
  const std::vector<uint32_t>& histogram() const { return histogram_; }
  int64_t block_count() const { return block_count_; }
  int64_t block_begin(int64_t b) const {
    return std::max(begin_, (first_block_ + b) * kBlockTokens);
  }
  int64_t block_end(int64_t b) const {
    return std::min(end_, (first_block_ + b + 1) * kBlockTokens);
  }
  // Bins of the tokens from `token` on.
  const uint16_t* bins(int64_t token) const { return workspace_->bins.data() + token - base_; }

 private:
  using FoundTokens = std::vector<std::vector<uint32_t>>;  // per block

  absl::Status ScoreBlock(const KeyScorer& scorer, int64_t block);
  // Applies WeighBin() to the bins of a page's tiles, and takes strays out of head_bins.
  void WeighPage(int64_t page, int tile_begin, int tile_end, uint16_t* bins,
                 uint16_t* const* head_bins) const;
  void CountBlock(int64_t block);
  // Number of histograms of a block: the group's and, with top-p, one per query head.
  int sets() const { return by_mass_ ? 1 + keys_.spec().group() : 1; }
  std::vector<uint32_t> SumHistograms(int set) const;
  // Adds each block's tokens above the threshold to found[block]. set: 0 for the group's bins, 1 +
  // g for those of query head g.
  void CollectAbove(int set, HeavyThreshold threshold, FoundTokens& found) const;

  const ScoredKeys keys_;
  const bool by_mass_;
  const bool with_levels_;
  const bool weighs_;      // whether WeighBin() applies to the bins
  const int usual_level_;  // with weighs_
  const int64_t begin_;
  const int64_t end_;
  const int64_t base_;  // token of bins[0], a multiple of 32
  const int64_t first_block_;
  const int64_t block_count_;
  int bin_count_ = 0;
  std::optional<WorkspacePool::Lease> workspace_holder_;
  SelectWorkspace* workspace_ = nullptr;
  LevelTerms level_terms_;
  std::vector<uint32_t> histogram_;
};

}  // namespace spillway
