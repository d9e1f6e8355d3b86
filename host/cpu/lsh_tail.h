#pragma once

#include <cstdint>
#include <vector>

#include "host/cpu/attend_context.h"
#include "host/cpu/score_pass.h"

namespace spillway {

// MagicPIG's sample (arXiv 2410.16179) of the tail of one (query, KV head): of
// every query head its own, the tokens that share kLshSharedMin buckets with it.
class LshTail {
 public:
  // Of the tokens that `scores` has not called heavy.
  LshTail(const AttendContext& context, const ScorePass& scores, const GroupQueries& queries,
          int kv_head);

  // What some query head takes, ascending.
  const std::vector<uint32_t>& tokens() const { return tokens_; }
  // Weighs `count` tokens from tokens()[first] on: logits [G][kRowBlock], of
  // the rows, are lessened by the log of the chance of being taken, and far
  // below all others where a query head does not take a token.
  void Weigh(int64_t first, int count, const std::byte* const* rows, float* logits) const;

 private:
  const AttendContext& context_;
  const GroupQueries& q_;
  const float* centre_;             // [d]
  std::vector<double> query_norm_;  // [G]
  std::vector<uint32_t> tokens_;
  std::vector<uint16_t> takers_;  // bit g: query head g
};

}  // namespace spillway
