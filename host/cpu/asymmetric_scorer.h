#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "host/core/rank_error.h"
#include "host/cpu/kernels.h"
#include "host/cpu/key_scorer.h"

namespace spillway {

// `asymmetric`: by logits estimated from codes of a rotation.
class AsymmetricScorer final : public KeyScorer {
 public:
  explicit AsymmetricScorer(const ScoredKeys& keys);

  absl::Status Prepare() override;
  absl::Status Bins(int64_t page, int tile_begin, int tile_end, uint16_t* bins,
                    uint16_t* const* head_bins) const override;
  bool Reweigh() override;
  void RankVariances(std::span<double> of_head) const override;

 private:
  // Makes query head g ready: weights, and what its estimates are off by.
  void PrepareHead(int g);
  // Fills centre_logits_.
  void FindCentreLogits();
  // CentreLogit() of a page, [G].
  const float* PageCentreLogits(int64_t page) const {
    return centre_logits_.data() + (page - first_page_) * keys_.spec().group();
  }
  // RankSums of query head g.
  RankSums<double> SumPages(int g) const;
  // Norm bytes of a page.
  const uint8_t* NormsOf(int64_t page) const {
    return reinterpret_cast<const uint8_t*>(PageOf(page)) + query_.layout.norm_offset_bytes();
  }
  const std::byte* PageOf(int64_t page) const { return pages_[page - first_page_]; }
  // Which keys of a page are summed up.
  void MaskPage(int64_t page, PageMask& mask) const;

  const ScoredKeys keys_;
  const int64_t first_page_;
  const int64_t page_count_;
  std::vector<const std::byte*> pages_;  // from first_page_ on, and a null behind
  std::vector<int8_t> weights_;
  ScoreQuery query_;
  std::vector<double> error_scale_;   // [G] RankErrorScale()
  std::vector<float> centre_logits_;  // [pages from first_page_][G]
  // [pages from first_page_][G]; each page's by the thread that scores it.
  mutable std::vector<RankSums<float>> page_sums_;
  std::vector<RankSums<double>> sums_;  // [G] over the pages; of Reweigh()
};

}  // namespace spillway
