#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "host/cpu/logit_scorer.h"
#include "host/methods/int4_keys/int4_elements.h"

namespace spillway {

// Scores keys by logits that are estimated from a section of 4-bit elements.
class Int4Scorer final : public LogitScorer {
 public:
  // section_offset: bytes from the start of an index page to the section. channels: the channels in
  // the section, in order; the array must outlive the scorer.
  Int4Scorer(const ScoredKeys& keys, int64_t section_offset, std::span<const uint16_t> channels);

 private:
  absl::Status PageLogits(int64_t page, float* logits) const override;

  const int64_t section_offset_;
  std::vector<float> channel_queries_;  // [G][channels]
  Int4Query query_;
};

}  // namespace spillway
