#pragma once

#include <cstdint>
#include <vector>

#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "gpu/device/block.h"
#include "gpu/kernels/append.h"
#include "gpu/kernels/resident.h"
#include "host/core/keyed_hash.h"
#include "host/memory/layer_rows.h"
#include "host/memory/page_table.h"
#include "host/model/model_spec.h"

namespace spillway::cuda {

// Rows of one layer of a sequence that are in GPU memory as well as in host memory: the first
// tokens, the resident sample (SampleOrder) and, in a ring, the newest tokens. Attends do not read
// them over the link. Not thread-safe.
class ResidentRowsOfLayer {
 public:
  // pool: pages of kResidentPageRows rows; null: holds no rows. All must outlive this object.
  ResidentRowsOfLayer(const ModelSpec& spec, PagePool* pool, BlockPools* blocks, int layer);
  // Shares the pages of the first token_count tokens of `source`, without the ring.
  ResidentRowsOfLayer(const ResidentRowsOfLayer& source, int64_t token_count);
  ResidentRowsOfLayer(ResidentRowsOfLayer&&) = default;
  ResidentRowsOfLayer& operator=(ResidentRowsOfLayer&&) = delete;

  int64_t bytes() const;
  // Chooses from the tokens up to token_count, and makes room for their rows. RESOURCE_EXHAUSTED
  // changes nothing.
  absl::Status Prepare(int64_t token_count);
  void Truncate(int64_t token_count);

  // Called with the address for a token's row: in the ring of newest tokens if `recent`, else among
  // the first tokens and the sample.
  using Place = absl::FunctionRef<void(int kv_head, int64_t token, std::byte* to, bool recent)>;
  // Calls `place` for each held row of tokens [begin, end), which counts as filled from then on.
  // REQUIRES: they are prepared.
  void Fill(int64_t begin, int64_t end, Place place);

  // Words of the tables in GPU memory that Sync() fills, for page_capacity pages of tokens of
  // head_count KV heads.
  static int64_t TableWords(int64_t head_count, int64_t page_capacity);
  // The same for the KV heads of which it holds rows.
  int64_t TableWords(int64_t page_capacity) const {
    return TableWords(static_cast<int64_t>(heads_.size()), page_capacity);
  }
  // Adds the updates that the tables need. tables: TableWords() words. anew: they are empty.
  void Sync(uint64_t* tables, int64_t page_capacity, bool anew, std::vector<TableUpdate>& updates);
  // The kernels' view of a KV head.
  ResidentRows View(uint64_t* tables, int64_t page_capacity, int kv_head) const;

 private:
  struct Head {
    SampleKey key;
    std::vector<ResidentPage> pages;
    PageTable rows;
    int64_t row_count = 0;
    int64_t synced_row_pages = 0;
  };
  // Marks which of tokens [first, token_count) are held. Returns the number of the head's rows.
  int64_t Choose(Head& head, int64_t first, int64_t token_count) const;
  // Address of a head's row number `rank`.
  std::byte* Row(const Head& head, int64_t rank) const;
  std::byte* RecentRow(int kv_head, int64_t token) const;

  const ModelSpec& spec_;
  PagePool* const pool_;
  BlockPools* const blocks_;
  const int layer_;
  const uint32_t sample_limit_;
  int64_t token_count_ = 0;  // tokens from which rows were chosen
  std::vector<Head> heads_;
  int64_t synced_pages_ = 0;  // pages of tokens unchanged since Sync()
  Block recent_;              // [H][kRecentRows] rows
  int64_t recent_begin_ = 0;  // the ring has tokens from here to the last one filled
};

}  // namespace spillway::cuda
