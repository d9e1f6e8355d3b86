#include "gpu/device/whole_rows.h"

#include <algorithm>
#include <utility>

namespace spillway::cuda {
namespace {

int64_t PagesFor(int64_t token_count) {
  return (token_count + kPageTokenCount - 1) / kPageTokenCount;
}

}  // namespace

WholeRowsOfLayer::WholeRowsOfLayer(const ModelSpec& spec, PagePool* pool)
    : spec_(spec), pool_(pool), grows_(pool != nullptr) {
  for (int h = 0; pool != nullptr && h < spec.kv_head_count; ++h) {
    tables_.emplace_back(pool, kPageTokenCount);
  }
}

WholeRowsOfLayer::WholeRowsOfLayer(const WholeRowsOfLayer& source, int64_t token_count)
    : spec_(source.spec_),
      pool_(source.pool_),
      grows_(pool_ != nullptr && source.end_ >= token_count),
      end_(std::min(source.end_, PagesFor(token_count) * kPageTokenCount)),
      filled_(std::min(source.filled_, token_count)) {
  for (const PageTable& table : source.tables_) tables_.push_back(table.Share(end_));
}

bool WholeRowsOfLayer::Reserve(int64_t start, int64_t end) {
  const int64_t begin = std::min(start, end_);
  const bool is_there = std::ranges::all_of(
      tables_, [&](const PageTable& table) { return table.NewPageCount(begin, end) == 0; });
  if (is_there) return true;
  std::vector<PageTable::StagedWrite> staged;
  staged.reserve(tables_.size());
  for (const PageTable& table : tables_) {
    absl::StatusOr<PageTable::StagedWrite> write = table.StageWrite(begin, end);
    if (!write.ok()) return false;
    staged.push_back(*std::move(write));
  }
  for (size_t h = 0; h < tables_.size(); ++h) tables_[h].Install(std::move(staged[h]));
  changed_page_ = std::min(changed_page_, begin / kPageTokenCount);
  end_ = std::max(end_, PagesFor(end) * kPageTokenCount);
  return true;
}

void WholeRowsOfLayer::Prepare(int64_t start, int64_t token_count, MakeRoom make_room) {
  if (pool_ == nullptr) return;
  if (start == 0) grows_ = true;
  while (grows_ && !Reserve(start, token_count)) grows_ = make_room();
  if (grows_ || start >= end_) return;
  // Make the last page writable, which a fork may share.
  if (!Reserve(start, end_)) GiveUp();
}

void WholeRowsOfLayer::Truncate(int64_t token_count) {
  filled_ = std::min(filled_, token_count);
  if (end_ < token_count) return;
  grows_ = pool_ != nullptr;
  end_ = PagesFor(token_count) * kPageTokenCount;
  changed_page_ = std::min(changed_page_, page_count());
  for (PageTable& table : tables_) table.Truncate(end_);
}

std::vector<PageTable> WholeRowsOfLayer::TakePages() {
  std::vector<PageTable> taken;
  taken.reserve(tables_.size());
  for (PageTable& table : tables_) {
    taken.push_back(std::exchange(table, PageTable(pool_, kPageTokenCount)));
  }
  grows_ = false;
  end_ = filled_ = changed_page_ = 0;
  return taken;
}

int64_t WholeRowsOfLayer::FirstUnfilled(int64_t token_count) const {
  return filled_ < std::min(token_count, end_) ? filled_ : token_count;
}

void WholeRowsOfLayer::SetFilled(int64_t token_count) { filled_ = std::min(token_count, end_); }

std::byte* WholeRowsOfLayer::Row(int kv_head, int64_t token) const {
  if (token >= end_) return nullptr;
  return Page(kv_head, token / kPageTokenCount) + token % kPageTokenCount * spec_.row_bytes();
}

int64_t WholeRowsOfLayer::bytes() const {
  int64_t bytes = 0;
  for (const PageTable& table : tables_) bytes += table.bytes();
  return bytes;
}

}  // namespace spillway::cuda
