#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "host/memory/page_pool.h"

namespace spillway {

// The pages of a list of items (rows or codes) in order, page_item_count items per page. Forks
// share pages copy-on-write. Move-only. Not thread-safe: the engine serialises all access to one
// sequence.
class PageTable {
 public:
  PageTable(PagePool* pool, int64_t page_item_count)
      : pool_(pool), page_item_count_(page_item_count) {}
  ~PageTable() { Clear(); }
  PageTable(PageTable&& other) noexcept;
  PageTable& operator=(PageTable&& other) noexcept;

  // Pages allocated for a write and not yet part of a table. Releases them unless they are
  // installed. Move-only.
  class StagedWrite {
   public:
    explicit StagedWrite(PagePool* pool) : pool_(pool) {}
    ~StagedWrite();
    StagedWrite(StagedWrite&& other) noexcept
        : pool_(other.pool_), begin_(other.begin_), pages_(std::exchange(other.pages_, {})) {}
    StagedWrite& operator=(StagedWrite&&) = delete;

   private:
    friend class PageTable;
    PagePool* pool_;
    int64_t begin_ = 0;
    std::vector<std::pair<int64_t, PageRef>> pages_;  // position in the table, ascending
  };

  // Makes items [begin, end) writable; begin must not be beyond the existing items. Adds new pages,
  // and replaces shared ones, which are copied only if the write begins behind their start.
  // RESOURCE_EXHAUSTED changes no page.
  absl::Status PrepareWrite(int64_t begin, int64_t end);
  // The two halves of PrepareWrite(), for writes to several tables of which all or none must
  // succeed. The table must not change between the two calls.
  absl::StatusOr<StagedWrite> StageWrite(int64_t begin, int64_t end) const;
  // Calls `installed`, unless null, for each new page and its position: after the old page was
  // copied to it, and before the old page is released.
  using Installed = std::function<void(int64_t position, PageRef page)>;
  void Install(StagedWrite staged, const Installed& installed = nullptr);
  // Pages that PrepareWrite would take from the pool.
  int64_t NewPageCount(int64_t begin, int64_t end) const;

  // Releases the pages behind the first item_count items.
  void Truncate(int64_t item_count);
  void Clear() { Truncate(0); }
  // Adds a page that PagePool::Adopt() returned.
  void Adopt(PageRef page) { pages_.push_back(page); }
  // A new table that shares the pages of the first item_count items.
  PageTable Share(int64_t item_count) const;

  int64_t page_count() const { return static_cast<int64_t>(pages_.size()); }
  // Memory of page i. Aborts if the reference is stale, which would be a bug.
  std::byte* Page(int64_t i) const;
  PageRef ref(int64_t i) const { return pages_[i]; }
  int64_t page_item_count() const { return page_item_count_; }
  int64_t page_bytes() const { return pool_->page_bytes(); }
  int64_t bytes() const { return page_count() * page_bytes(); }

 private:
  // Number of pages that hold item_count items.
  int64_t PagesFor(int64_t item_count) const;

  PagePool* pool_;
  int64_t page_item_count_;
  std::vector<PageRef> pages_;
};

}  // namespace spillway
