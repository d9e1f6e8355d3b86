#pragma once

#include <cstdint>
#include <vector>

#include "host/cpu/key_scorer.h"
#include "host/cpu/method_tail.h"
#include "host/cpu/score_pass.h"

namespace spillway {

// MagicPIG's sample (arXiv 2410.16179) of the tail of one (query, KV head): of
// every query head its own, the tokens that share kLshSharedMin buckets with it.
class LshTail final : public MethodTail {
 public:
  // Of the tokens that `scores` has not called heavy.
  LshTail(const ScoredKeys& keys, const ScorePass& scores);

  const std::vector<uint32_t>& tokens() const override { return tokens_; }
  // Logits are lessened by the log of the chance of being taken, and far below
  // all others where a query head does not take a token.
  void Weigh(int64_t first, int count, const std::byte* const* rows, float* logits) const override;

 private:
  const ScoredKeys keys_;
  const float* const centre_;       // [d]
  std::vector<double> query_norm_;  // [G]
  std::vector<uint32_t> tokens_;
  std::vector<uint16_t> takers_;  // bit g: query head g
};

}  // namespace spillway
