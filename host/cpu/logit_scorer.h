#pragma once

#include <cstdint>
#include <span>

#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "host/cpu/kernels.h"
#include "host/cpu/key_scorer.h"

namespace spillway {

// Computes the logits of a page's keys, times log2(e) as scores take them: [G][kPageTokenCount].
// next: the page that will be asked for next. Called from several threads.
using ReferenceLogits = absl::FunctionRef<absl::Status(int64_t page, int64_t next, float* logits)>;

// Finds what scores are relative to, from a sample of the keys (host/core/score.h). centre_logits:
// of all scored pages, [pages][G], or empty.
absl::Status FindReferences(const ScoredKeys& keys, ReferenceLogits logits,
                            std::span<const float> centre_logits, ScoreReferences& references);

// Scores keys by logits, exact or estimated, which a subclass computes.
class LogitScorer : public KeyScorer {
 public:
  explicit LogitScorer(const ScoredKeys& keys) : keys_(keys) {}

  absl::Status Prepare() override;
  absl::Status Bins(int64_t page, int tile_begin, int tile_end, uint16_t* bins,
                    uint16_t* const* head_bins) const override;

 protected:
  // Logits of a page's keys in nats, [G][kPageTokenCount]; those of tokens
  // that are not scored may be anything. Thread-safe.
  virtual absl::Status PageLogits(int64_t page, float* logits) const = 0;

  const ScoredKeys keys_;

 private:
  ScoreReferences references_;
};

// `oracle`: scores keys by their exact logits. OUT_OF_RANGE names a token whose logit is not
// finite.
class ExactScorer final : public LogitScorer {
 public:
  using LogitScorer::LogitScorer;

 private:
  absl::Status PageLogits(int64_t page, float* logits) const override;
};

}  // namespace spillway
