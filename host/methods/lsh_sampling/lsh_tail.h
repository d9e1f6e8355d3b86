#pragma once

#include <cstdint>
#include <vector>

#include "host/cpu/key_scorer.h"
#include "host/cpu/method_tail.h"
#include "host/cpu/score_pass.h"

namespace spillway {

// MagicPIG's sample (arXiv 2410.16179) of the tail of one (query, group). Each query head has its
// own sample: the tokens that share at least kLshSharedMin buckets with it.
class LshTail final : public MethodTail {
 public:
  // Samples the scored tokens that `scores` has not made heavy.
  LshTail(const ScoredKeys& keys, const ScorePass& scores);

  const std::vector<uint32_t>& tokens() const override { return tokens_; }
  // Subtracts from each logit the log of the token's sampling probability (LshLogWeight()). If a
  // query head does not take a token, the logit becomes kLshNotTaken.
  void Weigh(int64_t first, int count, const std::byte* const* rows, float* logits) const override;

 private:
  const ScoredKeys keys_;
  const float* const centre_;       // [d]
  std::vector<double> query_norm_;  // [G]
  std::vector<uint32_t> tokens_;
  std::vector<uint16_t> takers_;  // per token; bit g: query head g takes it
};

}  // namespace spillway
