#pragma once

#include <cstdint>
#include <vector>

#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "gpu/device/block.h"
#include "gpu/kernels/attend.h"
#include "host/core/keyed_hash.h"
#include "host/memory/layer_rows.h"
#include "host/memory/page_table.h"
#include "host/model/model_spec.h"

namespace spillway::cuda {

// The rows of one layer of a sequence that GPU memory holds beside the host's:
// the first tokens, the resident sample (SampleOrder) and, in a ring, the newest
// tokens. What an attend finds here does not cross the link. Not thread-safe.
class ResidentRowsOfLayer {
 public:
  // pool: of kResidentPageRows rows a page; null: nothing is held. All outlive
  // it.
  ResidentRowsOfLayer(const ModelSpec& spec, PagePool* pool, BlockPools* blocks, int layer);
  // The first token_count tokens of another's, pages shared; without the ring.
  ResidentRowsOfLayer(const ResidentRowsOfLayer& source, int64_t token_count);
  ResidentRowsOfLayer(ResidentRowsOfLayer&&) = default;
  ResidentRowsOfLayer& operator=(ResidentRowsOfLayer&&) = delete;

  int64_t bytes() const;
  // Room for the rows of tokens up to token_count, which are chosen now.
  // RESOURCE_EXHAUSTED changes nothing.
  absl::Status Prepare(int64_t token_count);
  void Truncate(int64_t token_count);

  // Is told where a token's row goes: of the first tokens and the sample, or to
  // the ring of recent ones.
  using Place = absl::FunctionRef<void(int kv_head, int64_t token, std::byte* to, bool recent)>;
  // Says where the rows of tokens [begin, end) go, which are here from then on.
  // REQUIRES: they are prepared.
  void Fill(int64_t begin, int64_t end, Place place);

  // Words of GPU memory that Sync() fills, for page_capacity pages of tokens.
  int64_t TableWords(int64_t page_capacity) const;
  // Adds what differs between the tables and what is known; `tables` are
  // TableWords() words. anew: they hold nothing yet.
  void Sync(uint64_t* tables, int64_t page_capacity, bool anew, std::vector<TableUpdate>& updates);
  // What kernels see of a KV head.
  ResidentRows View(uint64_t* tables, int64_t page_capacity, int kv_head) const;

 private:
  struct Head {
    SampleKey key;
    std::vector<ResidentPage> pages;
    PageTable rows;
    int64_t row_count = 0;
    int64_t synced_row_pages = 0;
  };
  // Notes which of tokens [first, token_count) are held. Returns the head's rows then.
  int64_t Choose(Head& head, int64_t first, int64_t token_count) const;
  // Row `rank` of a head.
  std::byte* Row(const Head& head, int64_t rank) const;
  std::byte* RecentRow(int kv_head, int64_t token) const;

  const ModelSpec& spec_;
  PagePool* const pool_;
  BlockPools* const blocks_;
  const int layer_;
  const uint32_t sample_limit_;
  int64_t token_count_ = 0;  // chosen from
  std::vector<Head> heads_;
  int64_t synced_pages_ = 0;  // that cannot have changed since Sync()
  Block recent_;              // [H][kRecentRows] rows
  int64_t recent_begin_ = 0;  // tokens from here to the last one filled are there
};

}  // namespace spillway::cuda
