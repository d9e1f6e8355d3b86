#pragma once

#include <cstdint>
#include <vector>

#include "absl/status/status.h"
#include "host/cpu/attend_context.h"
#include "host/cpu/kernels.h"

namespace spillway {

// How one selector scores the keys of one (query, KV head). Thread-safe once
// Prepare() has returned.
class KeyScorer {
 public:
  // Candidates are [begin, end), begin < end <= the layer's length.
  KeyScorer(const AttendContext& context, Selector selector, const GroupQueries& queries,
            int kv_head, int64_t begin, int64_t end);

  // Makes the query ready, and the references that scores are relative to.
  absl::Status Prepare();
  // Bins of scores, at most kScoreBinCount of them but for hamming.
  int bin_count() const { return bin_count_; }
  // Bins of tiles [tile_begin, tile_end) of a page, both even, 16 per tile.
  // head_bins (null, or G pointers) receives each query head's own, not of
  // hamming.
  absl::Status Bins(int64_t page, int tile_begin, int tile_end, uint16_t* bins,
                    uint16_t* const* head_bins) const;

 private:
  void PrepareAsymmetric();
  void PrepareHamming();
  void PrepareSketch();
  // Sets the references and head weights of the score query.
  absl::Status FindReferences();
  // Estimated logits times log2(e), or exact ones in nats, of a page:
  // [G][kPageTokenCount]. next: the page that will be asked for after it.
  absl::Status PageLogits(int64_t page, int64_t next, float* logits) const;
  absl::Status ExactLogits(int64_t page, float* logits) const;
  // Null beyond the last page.
  const std::byte* Codes(int64_t page) const;
  // Of the page's index, what stands behind the codes.
  const std::byte* Sections(int64_t page) const;

  const AttendContext& context_;
  const Selector selector_;
  const GroupQueries& q_;
  const int kv_head_;
  const int64_t begin_;
  const int64_t end_;
  int bin_count_;
  std::vector<int8_t> weights_;
  ScoreQuery score_query_;
  std::vector<float> channel_queries_;  // [G][channels]
  SketchQuery sketch_query_;
};

}  // namespace spillway
