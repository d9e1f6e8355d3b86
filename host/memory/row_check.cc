#include "host/memory/row_check.h"

#include <algorithm>
#include <optional>

#include "host/base/parallel.h"
#include "host/memory/layer_record.h"

namespace spillway {

void RowCheck::Add(const LayerRows& rows, int64_t token_count) {
  for (int h = 0; h < rows.kv_head_count(); ++h) {
    for (int64_t page = 0; page < token_count / kPageTokenCount; ++page) {
      const uint32_t index = rows.PageIndex(h, page);
      if (index >= known_.size()) known_.resize(size_t{index} + 1);
      if (known_[index]) continue;
      known_[index] = true;
      pages_.push_back({&rows, page, h});
    }
  }
}

void RowCheck::Run() {
  sums_.resize(known_.size());
  ParallelFor(size_t{0}, pages_.size(), [&](size_t i) {
    const Page& page = pages_[i];
    sums_[page.rows->PageIndex(page.kv_head, page.page)] =
        page.rows->SumOfPage(page.kv_head, page.page);
  });
}

RowCheck::Intact RowCheck::Find(const LayerRows& rows, const LayerRecord& record,
                                int64_t token_count) const {
  const std::optional<LayerRecord::Summed> summed = record.summed();
  // Without it, the rows in the open page cannot be checked, so they count as damaged.
  const int64_t covered = summed ? std::min(summed->token_count, token_count) : token_count;
  for (int64_t page = 0; page < covered / kPageTokenCount; ++page) {
    for (int h = 0; h < rows.kv_head_count(); ++h) {
      if (sums_[rows.PageIndex(h, page)] != record.PageSum(h, page)) {
        return {page * kPageTokenCount, h};
      }
    }
  }
  const bool open_is_right =
      covered % kPageTokenCount == 0 ||
      // Not if pages at the end are damaged: then token_count is where a page begins.
      (summed && summed->open_sum == rows.SumOfOpenRows(covered));
  if (!open_is_right) return {covered - covered % kPageTokenCount, -1};
  return {token_count, -1};
}

}  // namespace spillway
