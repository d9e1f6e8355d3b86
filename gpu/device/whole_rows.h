#pragma once

#include <cstdint>
#include <utility>
#include <vector>

#include "absl/functional/function_ref.h"
#include "host/base/limits.h"
#include "host/memory/page_table.h"
#include "host/model/model_spec.h"

namespace spillway::cuda {

// Copies in GPU memory of all rows of one layer of a sequence, from the first token on as far as
// there was room, so that attends read no host memory. Whatever writes a row to its page in host
// memory writes it here too, in the same job and before its attends. Not thread-safe.
class WholeRowsOfLayer {
 public:
  // pool: pages of kPageTokenCount rows; must outlive this object. Null: never holds rows.
  WholeRowsOfLayer(const ModelSpec& spec, PagePool* pool);
  // Shares the pages of the first token_count tokens, as far as `source` has them.
  WholeRowsOfLayer(const WholeRowsOfLayer& source, int64_t token_count);

  // Called if the pool has no room. Returns whether there is room now.
  using MakeRoom = absl::FunctionRef<bool()>;
  // Makes room for tokens up to token_count, if all tokens before them have room, or after
  // Resume(). If it fails, keeps what it has, and does not grow again before Resume() or a
  // Truncate() to end() or less. Tokens from `start` on are about to be written.
  void Prepare(int64_t start, int64_t token_count, MakeRoom make_room);
  // Lets the next Prepare() make the room that is missing.
  void Resume() { grows_ = pool_ != nullptr; }
  void Truncate(int64_t token_count);
  // Gives all pages away, and does not grow before Resume().
  std::vector<PageTable> TakePages();
  // Gives all pages back, and does not grow before Resume().
  void GiveUp() { TakePages(); }
  // Does not grow before Resume(), a Truncate() to end() or less, or tokens from the first one on.
  void Stop() { grows_ = false; }

  // Tokens [0, end()) have room; a multiple of kPageTokenCount.
  int64_t end() const { return end_; }
  // Whether fewer than token_count tokens have room.
  bool Lacks(int64_t token_count) const { return pool_ != nullptr && end_ < token_count; }
  // The first of tokens [0, token_count) that has room here but no row yet; else token_count.
  int64_t FirstUnfilled(int64_t token_count) const;
  bool LacksRows(int64_t token_count) const { return FirstUnfilled(token_count) < token_count; }
  // Says that rows of tokens up to token_count are here, as far as they have room.
  void SetFilled(int64_t token_count);

  int64_t page_count() const { return end_ / kPageTokenCount; }
  std::byte* Page(int kv_head, int64_t page) const { return tables_[kv_head].Page(page); }
  // A token's row; null if it has no room.
  std::byte* Row(int kv_head, int64_t token) const;
  // The first page that may have moved since the last call.
  int64_t TakeChangedPage() { return std::exchange(changed_page_, INT64_MAX); }
  int64_t bytes() const;

 private:
  // Makes room for tokens up to `end` in all tables, or in none.
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
