#pragma once

#include <cstdint>
#include <vector>

#include "host/cpu/kernels.h"
#include "host/cpu/key_scorer.h"

namespace spillway {

// `asymmetric`: by logits estimated from codes of a rotation.
class AsymmetricScorer final : public KeyScorer {
 public:
  explicit AsymmetricScorer(const ScoredKeys& keys) : keys_(keys) {}

  absl::Status Prepare() override;
  absl::Status Bins(int64_t page, int tile_begin, int tile_end, uint16_t* bins,
                    uint16_t* const* head_bins) const override;

 private:
  const ScoredKeys keys_;
  std::vector<int8_t> weights_;
  ScoreQuery query_;
};

}  // namespace spillway
