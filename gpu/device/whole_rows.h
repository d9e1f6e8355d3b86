#pragma once

#include <cstdint>
#include <utility>
#include <vector>

#include "absl/functional/function_ref.h"
#include "host/base/limits.h"
#include "host/memory/page_table.h"
#include "host/model/model_spec.h"

namespace spillway::cuda {

// Copies in GPU memory of all rows of one layer of a sequence, from the first
// token on as far as there was room, so that attends read no host memory. What
// writes a row to the host's page writes it here too: within a job, before its
// attends. Not thread-safe.
class WholeRowsOfLayer {
 public:
  // pool: of kPageTokenCount rows a page, outlives it; null: holds nothing ever.
  WholeRowsOfLayer(const ModelSpec& spec, PagePool* pool);
  // The first token_count tokens of another's as far as it has them, pages shared.
  WholeRowsOfLayer(const WholeRowsOfLayer& source, int64_t token_count);

  // Asked for room where the pool has none: true if there is some now.
  using MakeRoom = absl::FunctionRef<bool()>;
  // Takes room for tokens up to token_count, if it has room for all before them
  // or was told to Resume(). Where it finds none it keeps what it has, and grows
  // no more until then. Tokens from `start` on are about to be written.
  void Prepare(int64_t start, int64_t token_count, MakeRoom make_room);
  // The next Prepare() takes room for what lacks.
  void Resume() { grows_ = pool_ != nullptr; }
  void Truncate(int64_t token_count);
  // Gives all pages back.
  void GiveUp();

  // Tokens [0, end()) have room, a multiple of kPageTokenCount.
  int64_t end() const { return end_; }
  // Whether there is room for less than so many tokens.
  bool Lacks(int64_t token_count) const { return pool_ != nullptr && end_ < token_count; }
  // Of tokens [0, token_count), the first that has room here but no row yet; or token_count.
  int64_t FirstUnfilled(int64_t token_count) const;
  bool LacksRows(int64_t token_count) const { return FirstUnfilled(token_count) < token_count; }
  // Says that the rows of tokens up to token_count are here, as far as there is room.
  void SetFilled(int64_t token_count);

  int64_t page_count() const { return end_ / kPageTokenCount; }
  std::byte* Page(int kv_head, int64_t page) const { return tables_[kv_head].Page(page); }
  // A token's row; null if it has no room.
  std::byte* Row(int kv_head, int64_t token) const;
  // Pages below this have been where they are since it was last asked.
  int64_t TakeChangedPage() { return std::exchange(changed_page_, INT64_MAX); }
  int64_t bytes() const;

 private:
  // Room for tokens up to `end` in all tables, or in none.
  bool Reserve(int64_t start, int64_t end);

  const ModelSpec& spec_;
  PagePool* const pool_;
  bool grows_;
  std::vector<PageTable> tables_;  // per KV head
  int64_t end_ = 0;
  int64_t filled_ = 0;
  int64_t changed_page_ = 0;
};

}  // namespace spillway::cuda
