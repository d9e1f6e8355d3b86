#include "engine/shared_prefix.h"

#include <algorithm>
#include <limits>

#include "host/base/limits.h"

namespace spillway {
namespace {

// Whole pages that every layer has.
int64_t WholePages(SequenceRecord& record) {
  int64_t tokens = std::numeric_limits<int64_t>::max();
  for (int layer = 0; layer < record.layer_count(); ++layer) {
    tokens = std::min(tokens, record.layer(layer).token_count());
  }
  return tokens / kPageTokenCount;
}

// How many of the first `count` pages are the same, for a KV head of a layer.
int64_t SamePages(const LayerRecord& a, const LayerRecord& b, int kv_head, int64_t count) {
  int64_t page = 0;
  while (page < count && a.PageIndex(kv_head, page) == b.PageIndex(kv_head, page)) ++page;
  return page;
}

// The same for all layers and KV heads.
int64_t SamePages(SequenceRecord& a, SequenceRecord& b, int64_t count) {
  for (int layer = 0; layer < a.layer_count(); ++layer) {
    for (int head = 0; head < a.kv_head_count(); ++head) {
      count = SamePages(a.layer(layer), b.layer(layer), head, count);
    }
  }
  return count;
}

}  // namespace

std::optional<SharedPrefixes::Prefix> SharedPrefixes::Add(const Model& model,
                                                          SequenceRecord& record) {
  const size_t added = records_.size();
  records_.push_back(&record);
  const int64_t pages = WholePages(record);
  if (pages == 0) return std::nullopt;
  std::vector<size_t>& family = families_[{&model, record.layer(0).PageIndex(0, 0)}];
  // The candidates are compared by one KV head only, which is usually enough.
  Prefix best;
  int64_t best_pages = 0;
  for (size_t i = family.size() - std::min(family.size(), kLookedAtMax); i < family.size(); ++i) {
    SequenceRecord& other = *records_[family[i]];
    const int64_t same =
        SamePages(record.layer(0), other.layer(0), 0, std::min(pages, WholePages(other)));
    if (same > best_pages) {
      best_pages = same;
      best.source = family[i];
    }
  }
  family.push_back(added);
  if (best_pages > 0) best_pages = SamePages(record, *records_[best.source], best_pages);
  if (best_pages == 0) return std::nullopt;
  best.token_count = best_pages * kPageTokenCount;
  return best;
}

}  // namespace spillway
