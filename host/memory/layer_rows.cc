#include "host/memory/layer_rows.h"

#include <algorithm>
#include <cassert>
#include <cstring>
#include <limits>
#include <utility>

#include "host/base/status_macros.h"
#include "host/memory/layer_record.h"

namespace spillway {

LayerRows::LayerRows(PagePool* pool, const ModelSpec& spec)
    : pool_(pool), row_bytes_(spec.row_bytes()) {
  assert(pool->page_bytes() >= kPageTokenCount * row_bytes_);
  heads_.reserve(spec.kv_head_count);
  for (int h = 0; h < spec.kv_head_count; ++h) heads_.emplace_back(pool, kPageTokenCount);
}

absl::Status LayerRows::PrepareAppend(int64_t count) {
  assert(count >= 0 && count <= std::numeric_limits<int64_t>::max() - token_count_);
  const int64_t end = token_count_ + count;
  int64_t needed = 0;
  for (const PageTable& head : heads_) {
    if (__builtin_add_overflow(needed, head.NewPageCount(token_count_, end), &needed)) {
      needed = std::numeric_limits<int64_t>::max();
      break;
    }
  }
  if (needed == 0) return absl::OkStatus();
  if (needed > pool_->free_page_count()) return pool_->Exhausted("an append", needed);
  if (record_ != nullptr) {
    RETURN_IF_ERROR(record_->Reserve((end + kPageTokenCount - 1) / kPageTokenCount));
  }
  std::vector<PageTable::StagedWrite> staged;
  staged.reserve(heads_.size());
  for (const PageTable& head : heads_) {
    absl::StatusOr<PageTable::StagedWrite> write = head.StageWrite(token_count_, end);
    if (!write.ok()) {
      staged.clear();  // gives pages back before the free bytes are counted
      if (!absl::IsResourceExhausted(write.status())) return write.status();
      return pool_->Exhausted("an append", needed);
    }
    staged.push_back(*std::move(write));
  }
  for (size_t h = 0; h < heads_.size(); ++h) {
    PageTable::Installed installed;
    if (record_ != nullptr) {
      installed = [this, h](int64_t position, PageRef page) {
        record_->SetPageIndex(static_cast<int>(h), position, page.index);
      };
    }
    heads_[h].Install(std::move(staged[h]), installed);
  }
  return absl::OkStatus();
}

void LayerRows::WriteRows(int kv_head, int64_t start, int64_t from, int64_t to, const RowSource& k,
                          const RowSource& v) {
  assert(start >= 0 && 0 <= from && from <= to);
  const int64_t half = row_bytes_ / 2;
  for (int64_t t = from; t < to;) {
    const int64_t token = start + t;
    const int64_t place = token % kPageTokenCount;
    const int64_t run = std::min(to - t, kPageTokenCount - place);
    std::byte* row = heads_[kv_head].Page(token / kPageTokenCount) + place * row_bytes_;
    for (int64_t i = 0; i < run; ++i, ++t, row += row_bytes_) {
      std::memcpy(row, k.Row(kv_head, t), static_cast<size_t>(half));
      std::memcpy(row + half, v.Row(kv_head, t), static_cast<size_t>(half));
    }
  }
}

int64_t LayerRows::AdjacentRows(int kv_head, int64_t token, int64_t count) const {
  int64_t rows = std::min(kPageTokenCount - token % kPageTokenCount, count);
  const std::byte* const first = Row(kv_head, token);
  while (rows < count && Row(kv_head, token + rows) == first + rows * row_bytes_) {
    rows = std::min(rows + kPageTokenCount, count);
  }
  return rows;
}

void LayerRows::ReadRows(int kv_head, int64_t start, int64_t from, int64_t to, const RowTarget& k,
                         const RowTarget& v) const {
  assert(0 <= from && from <= to && start >= 0 && start + to <= token_count_);
  const int64_t half = row_bytes_ / 2;
  for (int64_t t = from; t < to;) {
    const int64_t token = start + t;
    const int64_t run = std::min(to - t, kPageTokenCount - token % kPageTokenCount);
    const std::byte* row = Row(kv_head, token);
    for (int64_t i = 0; i < run; ++i, ++t, row += row_bytes_) {
      std::memcpy(k.Row(kv_head, t), row, static_cast<size_t>(half));
      std::memcpy(v.Row(kv_head, t), row + half, static_cast<size_t>(half));
    }
  }
}

void LayerRows::Rollback() {
  for (PageTable& head : heads_) head.Truncate(token_count_);
}

uint64_t* LayerRows::length_word() const {
  return record_ == nullptr ? nullptr : record_->length_word();
}

void LayerRows::Truncate(int64_t token_count) {
  assert(token_count >= 0 && token_count <= token_count_);
  token_count_ = token_count;
  // The record is shortened before others can allocate the pages.
  if (record_ != nullptr) CutRecord(token_count);
  Rollback();
}

absl::Status LayerRows::Record(LayerRecord* record, const LayerRecord* sums) {
  const int64_t pages = heads_.front().page_count();
  RETURN_IF_ERROR(record->Reserve(pages));
  const int64_t full = token_count_ / kPageTokenCount;
  for (int h = 0; h < kv_head_count(); ++h) {
    for (int64_t p = 0; p < pages; ++p) {
      record->SetPageIndex(h, p, heads_[h].ref(p).index);
      record->SetPageSum(
          h, p, p < full ? sums->PageSum(h, p) : SumOfRows(h, p * kPageTokenCount, token_count_));
    }
  }
  record_ = record;
  summed_token_count_ = token_count_;
  record->SetTokenCount(token_count_, NotedOpenSum(token_count_));
  return absl::OkStatus();
}

absl::Status LayerRows::Adopt(const LayerRecord& record, int64_t token_count) {
  assert(bytes() == 0);
  const int64_t pages = (token_count + kPageTokenCount - 1) / kPageTokenCount;
  for (int h = 0; h < kv_head_count(); ++h) {
    for (int64_t p = 0; p < pages; ++p) {
      ASSIGN_OR_RETURN(const PageRef page, pool_->Adopt(record.PageIndex(h, p)));
      heads_[h].Adopt(page);
    }
  }
  return absl::OkStatus();
}

void LayerRows::CutAdopted(LayerRecord& record, int64_t token_count) {
  record.SetTokenCount(token_count, SumOfOpenRows(token_count));
  for (PageTable& head : heads_) head.Truncate(token_count);
}

LayerRows LayerRows::Share(int64_t token_count) const {
  assert(token_count >= 0 && token_count <= token_count_);
  LayerRows copy(pool_, row_bytes_);
  copy.token_count_ = token_count;
  copy.heads_.reserve(heads_.size());
  for (const PageTable& head : heads_) copy.heads_.push_back(head.Share(token_count));
  return copy;
}

bool LayerRows::Equals(int64_t start, int64_t count, const RowSource& k, const RowSource& v) const {
  assert(start >= 0 && count >= 0 && start + count <= token_count_);
  const int64_t half = row_bytes_ / 2;
  const auto bytes = static_cast<size_t>(half);
  for (int h = 0; h < kv_head_count(); ++h) {
    for (int64_t t = 0; t < count; ++t) {
      const std::byte* row = Row(h, start + t);
      if (std::memcmp(row, k.Row(h, t), bytes) != 0) return false;
      if (std::memcmp(row + half, v.Row(h, t), bytes) != 0) return false;
    }
  }
  return true;
}

int64_t LayerRows::bytes() const {
  int64_t sum = 0;
  for (const PageTable& head : heads_) sum += head.bytes();
  return sum;
}

}  // namespace spillway
