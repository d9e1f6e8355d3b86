#include "host/memory/layer_rows.h"

#include <algorithm>
#include <cassert>
#include <cstring>
#include <limits>
#include <utility>

#include "host/base/int8_rows.h"
#include "host/base/status_macros.h"
#include "host/memory/layer_record.h"

namespace spillway {

LayerRows::LayerRows(PagePool* pool, const ModelSpec& spec) : LayerRows(pool, spec.row_format()) {
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
  for (int64_t t = from; t < to;) {
    const int64_t token = start + t;
    const int64_t place = token % kPageTokenCount;
    const int64_t run = std::min(to - t, kPageTokenCount - place);
    std::byte* row = heads_[kv_head].Page(token / kPageTokenCount) + place * row_bytes_;
    for (int64_t i = 0; i < run; ++i, ++t, row += row_bytes_) {
      StoreRow(k.Row(kv_head, t), v.data == nullptr ? nullptr : v.Row(kv_head, t), row);
    }
  }
}

void LayerRows::StoreRow(const std::byte* k, const std::byte* v, std::byte* row) const {
  if (v == nullptr) {
    std::memcpy(row, k, static_cast<size_t>(row_bytes_));
  } else if (format_.type == RowType::kInt8) {
    EncodeInt8Row(format_, k, v, row);
  } else {
    const auto half = static_cast<size_t>(row_bytes_ / 2);
    std::memcpy(row, k, half);
    std::memcpy(row + half, v, half);
  }
}

void LayerRows::ReadRow(int kv_head, int64_t token, std::byte* k, std::byte* v) const {
  const std::byte* const row = Row(kv_head, token);
  if (v == nullptr) {
    std::memcpy(k, row, static_cast<size_t>(row_bytes_));
  } else if (format_.type == RowType::kInt8) {
    DecodeInt8Row(format_, row, k, v);
  } else {
    const auto half = static_cast<size_t>(row_bytes_ / 2);
    std::memcpy(k, row, half);
    std::memcpy(v, row + half, half);
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
  for (int64_t t = from; t < to; ++t) {
    ReadRow(kv_head, start + t, k.Row(kv_head, t), v.data == nullptr ? nullptr : v.Row(kv_head, t));
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
  LayerRows copy(pool_, format_);
  copy.token_count_ = token_count;
  copy.heads_.reserve(heads_.size());
  for (const PageTable& head : heads_) copy.heads_.push_back(head.Share(token_count));
  return copy;
}

bool LayerRows::Equals(int64_t start, int64_t count, const RowSource& k, const RowSource& v) const {
  assert(start >= 0 && count >= 0 && start + count <= token_count_);
  std::vector<std::byte> row(static_cast<size_t>(row_bytes_));
  for (int h = 0; h < kv_head_count(); ++h) {
    for (int64_t t = 0; t < count; ++t) {
      StoreRow(k.Row(h, t), v.data == nullptr ? nullptr : v.Row(h, t), row.data());
      if (std::memcmp(Row(h, start + t), row.data(), row.size()) != 0) return false;
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
