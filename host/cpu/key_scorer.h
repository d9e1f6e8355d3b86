#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>

#include "absl/status/status.h"
#include "host/core/histogram.h"
#include "host/cpu/attend_context.h"

namespace spillway {

// The keys of one (query, KV head) that are scored: tokens [begin, end), begin <
// end <= the layer's length. What it points at outlives it.
struct ScoredKeys {
  const AttendContext* context = nullptr;
  const GroupQueries* queries = nullptr;  // of the one query
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
  // Norm bytes of a closed page; of a model with a rotation.
  const uint8_t* Norms(int64_t page) const {
    return reinterpret_cast<const uint8_t*>(IndexPage(page)) + model().layout().norm_offset_bytes();
  }
};

// How a selector scores keys. Thread-safe once Prepare() has returned.
class KeyScorer {
 public:
  virtual ~KeyScorer() = default;
  // Makes the query ready, and what scores are relative to. Called once.
  virtual absl::Status Prepare() = 0;
  // Bins of scores, after Prepare(); higher ones hold keys of higher scores.
  virtual int bin_count() const { return kScoreBinCount; }
  // Bins of tiles [tile_begin, tile_end) of a page, both even, kTileTokenCount
  // per tile. head_bins (null, or G pointers) receives each query head's own;
  // only of selectors that estimate logits. What it writes of tokens beyond
  // [begin, end) is not read.
  virtual absl::Status Bins(int64_t page, int tile_begin, int tile_end, uint16_t* bins,
                            uint16_t* const* head_bins) const = 0;
  // Once all tokens have bins: whether heads must be weighted anew, which is then
  // done, and all bins be found once more.
  virtual bool Reweigh() { return false; }
  // Each query head's RankVariance(), after Reweigh(); 0 where there is nothing to
  // say.
  virtual void RankVariances(std::span<double> of_head) const {
    std::fill(of_head.begin(), of_head.end(), 0.0);
  }
};

// A selector's scorer. REQUIRES: the model serves it, and it is not `all`.
std::unique_ptr<KeyScorer> MakeScorer(Selector selector, const ScoredKeys& keys);

// The scorer of the attend's policy: its selector's, behind its first selection
// if it has one.
std::unique_ptr<KeyScorer> MakeScorer(const ScoredKeys& keys);

}  // namespace spillway
