#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <numeric>
#include <span>

#include "absl/status/status.h"
#include "host/core/histogram.h"
#include "host/cpu/attend_context.h"

namespace spillway {

// The keys of one (query, group) that are scored: tokens [begin, end), begin < end <= the layer's
// length. All pointers must outlive it.
struct ScoredKeys {
  const AttendContext* context = nullptr;
  const GroupQueries* queries = nullptr;  // of this query alone
  int64_t query = 0;                      // [0, T)
  int kv_head = 0;
  int64_t begin = 0;
  int64_t end = 0;

  const ModelSpec& spec() const { return context->spec(); }
  const CpuModel& model() const { return *context->model; }
  // The index page of tokens [page, page + 1) * kPageTokenCount; null beyond the
  // last.
  const std::byte* IndexPage(int64_t page) const {
    const PageTable& pages = context->index->codes[kv_head];
    return page < pages.page_count() ? pages.Page(page) : nullptr;
  }
  // Norm bytes of a closed page. REQUIRES: the model has a rotation.
  const uint8_t* Norms(int64_t page) const {
    return reinterpret_cast<const uint8_t*>(IndexPage(page)) + model().layout().norm_offset_bytes();
  }
  // The level of a closed page. REQUIRES: the model has a rotation.
  int Level(int64_t page) const {
    const uint8_t* norms = Norms(page);
    return std::accumulate(norms, norms + kPageTokenCount, 0);
  }
};

// What levels of x^ are relative to, for each query head; valid as long as their scorer.
struct LevelTerms {
  const float* references = nullptr;  // [G] M_h
  const float* shrinkage = nullptr;   // [G] LevelShrinkage()
};

// Scores keys as a selector does. Const methods are thread-safe once Prepare() has returned.
class KeyScorer {
 public:
  virtual ~KeyScorer() = default;
  // Prepares the query, and what scores are relative to. Called once.
  virtual absl::Status Prepare() = 0;
  // Number of bins, after Prepare(). Higher bins hold keys of higher scores.
  virtual int bin_count() const { return kScoreBinCount; }
  // Bins of tiles [tile_begin, tile_end) of a page, both even, kTileTokenCount per tile. head_bins
  // (null, or G pointers) receives the bins of each query head; only selectors that estimate logits
  // have them. Bins of tokens outside [begin, end) are not read.
  virtual absl::Status Bins(int64_t page, int tile_begin, int tile_end, uint16_t* bins,
                            uint16_t* const* head_bins) const = 0;
  // Makes Bins() also write the levels of x^ (host/core/value_code.h) of each query head:
  // [page from that of `begin` on][G][kPageTokenCount], 0 for tokens that are not scored and for
  // strays. Called before Bins(). Returns what they mean; without references, the selector does not
  // estimate logits from codes, and writes none.
  virtual LevelTerms KeepLevels(uint8_t* levels) {
    static_cast<void>(levels);
    return {};
  }
  // Called once all tokens have bins. Returns whether it has changed the weights of the query
  // heads; then all bins must be computed again.
  virtual bool Reweigh() { return false; }
  // Whether a page's tokens carry mass (host/core/value_code.h), after Reweigh(). False if the
  // selector does not estimate logits from codes.
  virtual bool HasMass(int64_t page) const {
    static_cast<void>(page);
    return false;
  }
  // RankVariance() of each query head, after Reweigh(); 0 if the selector does not estimate it.
  virtual void RankVariances(std::span<double> of_head) const {
    std::fill(of_head.begin(), of_head.end(), 0.0);
  }
};

// The scorer of a selector. REQUIRES: the model serves the selector, and it is not `all`.
std::unique_ptr<KeyScorer> MakeScorer(Selector selector, const ScoredKeys& keys);

// The scorer of the attend's policy: that of its selector, behind the policy's first selection if
// it has one.
std::unique_ptr<KeyScorer> MakeScorer(const ScoredKeys& keys);

}  // namespace spillway
