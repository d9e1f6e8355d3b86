#pragma once

#include <algorithm>
#include <cstdint>
#include <optional>
#include <vector>

#include "absl/status/status.h"
#include "host/core/histogram.h"
#include "host/cpu/attend_context.h"
#include "host/cpu/key_scorer.h"

namespace spillway {

// Scores of the candidates of one (query, KV head), kept as histogram bins.
// Tokens are cut into blocks at multiples of kBlockTokens, whatever the number
// of threads.
class ScorePass {
 public:
  static constexpr int64_t kBlockTokens = 16384;

  // Candidates are [begin, end), begin < end <= the layer's length.
  ScorePass(const AttendContext& context, int64_t query, int kv_head, int64_t begin, int64_t end);

  // Fills the bins and the histogram by the policy's selector, of its first
  // selection's finds if it has one.
  absl::Status Score();
  // Chooses the heavy set, marks its tokens in the bins and takes them out of
  // the histogram. Returns them ascending.
  std::vector<uint32_t> TakeHeavy();

  // Tokens per group bin; after TakeHeavy those of the tail.
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
  absl::Status ScoreBy(Selector selector, bool by_mass);
  absl::Status ScoreBlock(int64_t block);
  // Puts what the first selection did not find in the lowest bin.
  void DropOthers(int64_t block);
  void CountBlock(int64_t block);
  // Histogram set 0 is the group's, set 1 + g query head g's (top-p only).
  std::vector<uint32_t> SumHistograms(int set) const;
  // Adds each block's tokens above the threshold to found[block].
  void CollectAbove(int set, HeavyThreshold threshold,
                    std::vector<std::vector<uint32_t>>& found) const;

  const AttendContext& context_;
  const int64_t query_;
  const int kv_head_;
  const int64_t begin_;
  const int64_t end_;
  const int64_t base_;  // token of bins[0], a multiple of 32
  const int64_t first_block_;
  const int64_t block_count_;
  bool by_mass_ = false;
  int bin_count_ = kScoreBinCount;
  GroupQueries q_;
  std::optional<KeyScorer> scorer_;
  std::vector<std::vector<uint32_t>> candidates_;  // per block, of a first selection
  std::optional<WorkspacePool::Lease> workspace_holder_;
  SelectWorkspace* workspace_ = nullptr;
  std::vector<uint32_t> histogram_;
};

}  // namespace spillway
