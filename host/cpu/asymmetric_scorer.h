#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "host/core/rank_error.h"
#include "host/cpu/kernels.h"
#include "host/cpu/key_scorer.h"

namespace spillway {

// `asymmetric`: scores keys by logits that are estimated from a rotation's codes.
class AsymmetricScorer final : public KeyScorer {
 public:
  explicit AsymmetricScorer(const ScoredKeys& keys);

  absl::Status Prepare() override;
  absl::Status Bins(int64_t page, int tile_begin, int tile_end, uint16_t* bins,
                    uint16_t* const* head_bins) const override;
  LevelTerms KeepLevels(uint8_t* levels) override;
  bool Reweigh() override;
  bool HasMass(int64_t page) const override;
  void RankVariances(std::span<double> of_head) const override;

 private:
  // Prepares query head g: its weights, and the error of its estimates.
  void PrepareHead(int g);
  // Fills centre_logits_.
  void FindCentreLogits();
  // CentreLogit() of a page for each query head, [G].
  const float* PageCentreLogits(int64_t page) const {
    return centre_logits_.data() + (page - first_page_) * keys_.spec().group();
  }
  // RankSums of query head g over all pages.
  RankSums<double> SumPages(int g) const;
  // Norm bytes of a page.
  const uint8_t* NormsOf(int64_t page) const {
    return reinterpret_cast<const uint8_t*>(PageOf(page)) + query_.layout.norm_offset_bytes();
  }
  const std::byte* PageOf(int64_t page) const { return pages_[page - first_page_]; }
  // Marks the keys of a page that are summed up. Returns whether all are.
  bool MaskPage(int64_t page, PageMask& mask) const;

  const ScoredKeys keys_;
  const int64_t first_page_;
  const int64_t page_count_;
  std::vector<const std::byte*> pages_;  // from first_page_ on; a null after the last
  std::vector<int8_t> weights_;
  ScoreQuery query_;
  std::vector<double> error_scale_;   // [G] RankErrorScale()
  std::vector<float> shrinkage_;      // [G] LevelShrinkage()
  uint8_t* levels_ = nullptr;         // of KeepLevels(); null: none are kept
  std::vector<float> centre_logits_;  // [pages from first_page_][G]
  // [pages from first_page_][G]; the thread that scores a page writes its entries.
  mutable std::vector<RankSums<float>> page_sums_;
  std::vector<RankSums<double>> sums_;  // [G] over all pages; filled by Reweigh()
};

}  // namespace spillway
