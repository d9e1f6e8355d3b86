#include "host/memory/page_table.h"

#include <algorithm>
#include <cassert>
#include <cstdio>
#include <cstdlib>

#include "host/base/status_macros.h"

namespace spillway {

PageTable::StagedWrite::~StagedWrite() {
  for (const auto& [position, page] : pages_) pool_->Release(page);
}

PageTable::PageTable(PageTable&& other) noexcept
    : pool_(other.pool_),
      page_item_count_(other.page_item_count_),
      pages_(std::exchange(other.pages_, {})) {}

PageTable& PageTable::operator=(PageTable&& other) noexcept {
  if (this != &other) {
    Clear();
    pool_ = other.pool_;
    page_item_count_ = other.page_item_count_;
    pages_ = std::exchange(other.pages_, {});
  }
  return *this;
}

int64_t PageTable::PagesFor(int64_t item_count) const {
  return item_count / page_item_count_ + (item_count % page_item_count_ != 0);
}

int64_t PageTable::NewPageCount(int64_t begin, int64_t end) const {
  if (begin >= end) return 0;
  int64_t count = std::max<int64_t>(PagesFor(end) - page_count(), 0);
  const int64_t existing = std::min(PagesFor(end), page_count());
  for (int64_t i = begin / page_item_count_; i < existing; ++i) count += pool_->IsShared(pages_[i]);
  return count;
}

absl::StatusOr<PageTable::StagedWrite> PageTable::StageWrite(int64_t begin, int64_t end) const {
  StagedWrite staged(pool_);
  staged.begin_ = begin;
  if (begin >= end) return staged;
  assert(begin >= 0 && begin <= page_count() * page_item_count_);
  // Checked before anything is allocated, so that a request that cannot fit has no cost.
  const int64_t needed = NewPageCount(begin, end);
  if (needed == 0) return staged;
  if (needed > pool_->free_page_count()) return pool_->Exhausted("a write", needed);
  const int64_t first = begin / page_item_count_;
  PageRef neighbour = first > 0 ? pages_[first - 1] : PageRef{};
  for (int64_t i = first; i < PagesFor(end); ++i) {
    if (i < page_count() && !pool_->IsShared(pages_[i])) {
      neighbour = pages_[i];
      continue;
    }
    const absl::StatusOr<PageRef> page = pool_->Allocate(neighbour);
    if (!page.ok()) {
      if (!absl::IsResourceExhausted(page.status())) return page.status();
      return pool_->Exhausted("a write", needed);
    }
    staged.pages_.emplace_back(i, *page);
    neighbour = *page;
  }
  return staged;
}

void PageTable::Install(StagedWrite staged, const Installed& installed) {
  for (const auto& [position, page] : staged.pages_) {
    if (position >= page_count()) {
      assert(position == page_count());
      pages_.push_back(page);
      if (installed != nullptr) installed(position, page);
      continue;
    }
    // The items before the write are kept. The items behind its start are about to be written, or
    // do not exist.
    if (position * page_item_count_ < staged.begin_) {
      pool_->Copy(pool_->Data(page), Page(position));
    }
    if (installed != nullptr) installed(position, page);
    pool_->Release(std::exchange(pages_[position], page));
  }
  staged.pages_.clear();
}

absl::Status PageTable::PrepareWrite(int64_t begin, int64_t end) {
  ASSIGN_OR_RETURN(StagedWrite staged, StageWrite(begin, end));
  Install(std::move(staged));
  return absl::OkStatus();
}

void PageTable::Truncate(int64_t item_count) {
  const int64_t kept = PagesFor(item_count);
  while (page_count() > kept) {
    pool_->Release(pages_.back());
    pages_.pop_back();
  }
}

PageTable PageTable::Share(int64_t item_count) const {
  assert(PagesFor(item_count) <= page_count());
  PageTable table(pool_, page_item_count_);
  table.pages_.assign(pages_.begin(), pages_.begin() + PagesFor(item_count));
  for (const PageRef page : table.pages_) pool_->AddReference(page);
  return table;
}

std::byte* PageTable::Page(int64_t i) const {
  std::byte* data = pool_->Data(pages_[i]);
  if (data == nullptr) {
    std::fprintf(stderr, "page table: page %lld is stale\n", static_cast<long long>(i));
    std::abort();
  }
  return data;
}

}  // namespace spillway
