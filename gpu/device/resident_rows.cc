#include "gpu/device/resident_rows.h"

#include <algorithm>
#include <bit>
#include <cstring>
#include <utility>

#include "host/base/parallel.h"
#include "host/base/status_macros.h"

namespace spillway::cuda {
namespace {

constexpr int64_t kPageWords = sizeof(ResidentPage) / sizeof(uint64_t);
static_assert(sizeof(ResidentPage) % sizeof(uint64_t) == 0);
// Most pages of rows for a page of tokens.
constexpr int64_t kRowPages = kPageTokenCount / kResidentPageRows;

uint32_t CountRows(const ResidentPage& page) {
  uint32_t count = 0;
  for (uint32_t word : page.mask) count += static_cast<uint32_t>(std::popcount(word));
  return count;
}

}  // namespace

ResidentRowsOfLayer::ResidentRowsOfLayer(const ModelSpec& spec, PagePool* pool, BlockPools* blocks,
                                         int layer)
    : spec_(spec),
      pool_(pool),
      blocks_(blocks),
      layer_(layer),
      sample_limit_(spec.ResidentSample(spec.resident_sample_seed)) {
  for (int h = 0; pool != nullptr && h < spec.kv_head_count; ++h) {
    heads_.push_back(
        {MakeSampleKey(spec.resident_sample_seed, spec.first_layer + layer, spec.first_kv_head + h),
         {},
         PageTable(pool, kResidentPageRows)});
  }
}

ResidentRowsOfLayer::ResidentRowsOfLayer(const ResidentRowsOfLayer& source, int64_t token_count)
    : ResidentRowsOfLayer(source.spec_, source.pool_, source.blocks_, source.layer_) {
  for (size_t h = 0; h < heads_.size(); ++h) {
    heads_[h].pages = source.heads_[h].pages;
    heads_[h].rows = source.heads_[h].rows.Share(source.heads_[h].row_count);
    heads_[h].row_count = source.heads_[h].row_count;
  }
  token_count_ = source.token_count_;
  Truncate(token_count);
  recent_begin_ = token_count_;
}

int64_t ResidentRowsOfLayer::bytes() const {
  int64_t bytes = recent_.bytes();
  for (const Head& head : heads_) bytes += head.rows.bytes();
  return bytes;
}

absl::Status ResidentRowsOfLayer::Prepare(int64_t token_count) {
  if (heads_.empty() || token_count <= token_count_) return absl::OkStatus();
  if (!recent_) {
    ASSIGN_OR_RETURN(
        recent_, Block::Create(blocks_->Of(spec_.kv_head_count * kRecentRows * spec_.row_bytes())));
  }
  const int64_t first = token_count_;
  token_count_ = token_count;
  std::vector<int64_t> counts(heads_.size());
  const auto choose = [&](size_t h) { counts[h] = Choose(heads_[h], first, token_count); };
  // A hash takes 0.2 ns per token. For many, waking the workers pays.
  constexpr int64_t kManyTokens = int64_t{1} << 20;
  if ((token_count - first) * static_cast<int64_t>(heads_.size()) < kManyTokens) {
    for (size_t h = 0; h < heads_.size(); ++h) choose(h);
  } else {
    Isolated([&] { ParallelFor(size_t{0}, heads_.size(), choose); });
  }
  for (size_t h = 0; h < heads_.size(); ++h) {
    Head& head = heads_[h];
    if (counts[h] > head.row_count) {
      synced_pages_ = std::min(synced_pages_, first / kPageTokenCount);
    }
    // A page with room that a fork shares is replaced now, while nothing reads it, and not when a
    // row is chosen: steps that are under way would go on to read it, and the fork may free it.
    const bool has_room = head.row_count % kResidentPageRows != 0;
    absl::Status status = head.rows.PrepareWrite(
        head.row_count, std::max(counts[h], head.row_count + (has_room ? 1 : 0)));
    if (!status.ok()) {
      Truncate(first);
      return status;
    }
    // Pages that are written may have been replaced, if a fork shares them.
    head.synced_row_pages = std::min(head.synced_row_pages, head.row_count / kResidentPageRows);
    head.row_count = counts[h];
  }
  return absl::OkStatus();
}

int64_t ResidentRowsOfLayer::Choose(Head& head, int64_t first, int64_t token_count) const {
  head.pages.resize(static_cast<size_t>((token_count + kPageTokenCount - 1) / kPageTokenCount));
  int64_t count = head.row_count;
  for (int64_t begin = first / 32 * 32; begin < token_count; begin += 32) {
    ResidentPage& page = head.pages[begin / kPageTokenCount];
    if (begin % kPageTokenCount == 0 && begin >= first) {
      page = {{}, static_cast<uint32_t>(count), 0};
    }
    uint32_t chosen = TokensBelow(head.key, static_cast<uint32_t>(begin), sample_limit_);
    static_assert(kResidentSink % 32 == 0);
    if (begin < kResidentSink) chosen = ~0u;
    if (begin < first) chosen &= ~0u << (first - begin);
    if (token_count - begin < 32) chosen &= (1u << (token_count - begin)) - 1;
    page.mask[begin % kPageTokenCount / 32] |= chosen;
    count += std::popcount(chosen);
  }
  return count;
}

void ResidentRowsOfLayer::Truncate(int64_t token_count) {
  if (token_count >= token_count_) return;
  token_count_ = token_count;
  recent_begin_ = std::min(recent_begin_, token_count);
  if (token_count == 0) recent_ = Block();
  const int64_t page_count = (token_count + kPageTokenCount - 1) / kPageTokenCount;
  synced_pages_ = std::min(synced_pages_, token_count / kPageTokenCount);
  for (Head& head : heads_) {
    head.pages.resize(static_cast<size_t>(page_count));
    head.row_count = 0;
    if (page_count > 0) {
      ResidentPage& last = head.pages.back();
      const int64_t kept = token_count - (page_count - 1) * kPageTokenCount;
      for (int64_t slot = kept; slot < kPageTokenCount; ++slot) {
        last.mask[slot / 32] &= ~(1u << (slot % 32));
      }
      head.row_count = last.before + CountRows(last);
    }
    head.rows.Truncate(head.row_count);
    head.synced_row_pages = std::min(head.synced_row_pages, head.row_count / kResidentPageRows);
  }
}

std::byte* ResidentRowsOfLayer::Row(const Head& head, int64_t rank) const {
  return head.rows.Page(rank / kResidentPageRows) + rank % kResidentPageRows * spec_.row_bytes();
}

std::byte* ResidentRowsOfLayer::RecentRow(int kv_head, int64_t token) const {
  return recent_.data() + (kv_head * kRecentRows + token % kRecentRows) * spec_.row_bytes();
}

void ResidentRowsOfLayer::Fill(int64_t begin, int64_t end, Place place) {
  if (heads_.empty()) return;
  const int64_t recent = std::max(begin, end - kRecentRows);
  for (int h = 0; h < static_cast<int>(heads_.size()); ++h) {
    const Head& head = heads_[h];
    for (int64_t p = begin / kPageTokenCount; p * kPageTokenCount < end; ++p) {
      const ResidentPage& page = head.pages[p];
      int64_t rank = page.before;
      for (int64_t w = 0; w < kPageTokenCount / 32; ++w) {
        for (uint32_t mask = page.mask[w]; mask != 0; mask &= mask - 1, ++rank) {
          const int64_t token = p * kPageTokenCount + w * 32 + std::countr_zero(mask);
          if (token < begin || token >= end) continue;
          place(h, token, Row(head, rank), /*recent=*/false);
        }
      }
    }
    for (int64_t token = recent; token < end; ++token) {
      place(h, token, RecentRow(h, token), /*recent=*/true);
    }
  }
  // If more tokens are new than the ring holds, it holds none of the older ones.
  recent_begin_ = recent > begin ? recent : std::max(recent_begin_, end - kRecentRows);
}

int64_t ResidentRowsOfLayer::TableWords(int64_t head_count, int64_t page_capacity) {
  return head_count * page_capacity * (kPageWords + kRowPages);
}

void ResidentRowsOfLayer::Sync(uint64_t* tables, int64_t page_capacity, bool anew,
                               std::vector<TableUpdate>& updates) {
  if (anew) synced_pages_ = 0;
  uint64_t* const row_tables =
      tables + static_cast<int64_t>(heads_.size()) * page_capacity * kPageWords;
  for (size_t h = 0; h < heads_.size(); ++h) {
    Head& head = heads_[h];
    for (auto p = static_cast<size_t>(synced_pages_); p < head.pages.size(); ++p) {
      uint64_t words[kPageWords];
      std::memcpy(words, &head.pages[p], sizeof(words));
      uint64_t* slot =
          tables + (static_cast<int64_t>(h) * page_capacity + static_cast<int64_t>(p)) * kPageWords;
      for (uint64_t word : words) updates.push_back({slot++, word});
    }
    if (anew) head.synced_row_pages = 0;
    for (int64_t p = head.synced_row_pages; p < head.rows.page_count(); ++p) {
      updates.push_back({row_tables + static_cast<int64_t>(h) * page_capacity * kRowPages + p,
                         reinterpret_cast<uint64_t>(head.rows.Page(p))});
    }
    head.synced_row_pages = head.rows.page_count();
  }
  synced_pages_ = (token_count_ + kPageTokenCount - 1) / kPageTokenCount;
}

ResidentRows ResidentRowsOfLayer::View(uint64_t* tables, int64_t page_capacity, int kv_head) const {
  ResidentRows view{};
  view.recent_begin = INT64_MAX;
  if (heads_.empty() || token_count_ == 0) return view;
  view.pages = reinterpret_cast<const ResidentPage*>(tables + kv_head * page_capacity * kPageWords);
  view.row_pages = reinterpret_cast<const std::byte* const*>(
      tables +
      (static_cast<int64_t>(heads_.size()) * kPageWords + kv_head * kRowPages) * page_capacity);
  view.sink = std::min<int64_t>(kResidentSink, token_count_);
  if (recent_) {
    view.recent = RecentRow(kv_head, 0);
    view.recent_begin = recent_begin_;
  }
  return view;
}

}  // namespace spillway::cuda
