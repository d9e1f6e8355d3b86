// Checksums of the rows of a layer that outlive the process.
#include <algorithm>
#include <cassert>
#include <vector>

#include "host/base/parallel.h"
#include "host/memory/checksum.h"
#include "host/memory/layer_record.h"
#include "host/memory/layer_rows.h"

namespace spillway {
namespace {

// With fewer bytes than this, waking workers costs more than it saves.
constexpr int64_t kSerialBytes = 256 << 10;

}  // namespace

uint64_t LayerRows::SumOfPage(int kv_head, int64_t page) const {
  return Checksum({Page(kv_head, page), static_cast<size_t>(kPageTokenCount * row_bytes_)});
}

uint64_t LayerRows::SumOfRows(int kv_head, int64_t from, int64_t to) const {
  uint64_t sum = 0;
  for (int64_t token = from; token < to; ++token) {
    const uint64_t place = static_cast<uint64_t>(kv_head) * kPageTokenCount +
                           static_cast<uint64_t>(token % kPageTokenCount);
    sum += Checksum(Checksum({Row(kv_head, token), static_cast<size_t>(row_bytes_)}), place);
  }
  return sum;
}

uint64_t LayerRows::SumOfOpenRows(int64_t token_count) const {
  uint64_t sum = 0;
  for (int h = 0; h < kv_head_count(); ++h) {
    sum += SumOfRows(h, token_count - token_count % kPageTokenCount, token_count);
  }
  return sum;
}

uint64_t LayerRows::NotedOpenSum(int64_t token_count) const {
  if (token_count % kPageTokenCount == 0) return 0;
  uint64_t sum = 0;
  for (int h = 0; h < kv_head_count(); ++h) {
    sum += record_->PageSum(h, token_count / kPageTokenCount);
  }
  return sum;
}

void LayerRows::SumRows(int kv_head, int64_t from, int64_t to) {
  const int64_t page = from / kPageTokenCount;
  assert(from < to && to <= (page + 1) * kPageTokenCount);
  if (to % kPageTokenCount == 0) {
    record_->SetPageSum(kv_head, page, SumOfPage(kv_head, page));
    return;
  }
  const uint64_t before = from % kPageTokenCount == 0 ? 0 : record_->PageSum(kv_head, page);
  record_->SetPageSum(kv_head, page, before + SumOfRows(kv_head, from, to));
}

void LayerRows::SumUpTo(int64_t token_count) {
  const int64_t from = summed_token_count_;
  if (record_ == nullptr || token_count <= from) return;
  const int64_t first = from / kPageTokenCount;
  const int64_t pages = (token_count + kPageTokenCount - 1) / kPageTokenCount - first;
  const auto sum = [&](int64_t task) {
    const int64_t start = (first + task % pages) * kPageTokenCount;
    SumRows(static_cast<int>(task / pages), std::max(from, start),
            std::min(token_count, start + kPageTokenCount));
  };
  const int64_t tasks = pages * kv_head_count();
  if ((token_count - from) * kv_head_count() * row_bytes_ < kSerialBytes) {
    for (int64_t task = 0; task < tasks; ++task) sum(task);
  } else {
    ParallelFor(int64_t{0}, tasks, sum);
  }
  summed_token_count_ = token_count;
}

void LayerRows::Keep(int64_t token_count) {
  if (record_ == nullptr) return;
  SumUpTo(token_count);
  record_->SetTokenCount(token_count, NotedOpenSum(token_count));
}

void LayerRows::KeepWritten(int64_t token_count) {
  if (record_ == nullptr) return;
  SumUpTo(token_count);
  record_->SetSummed(token_count, NotedOpenSum(token_count));
}

void LayerRows::CutRecord(int64_t token_count) {
  SumUpTo(token_count);
  std::vector<uint64_t> sums(heads_.size());
  const int64_t page = token_count / kPageTokenCount;
  const int64_t start = page * kPageTokenCount;
  const int64_t end = std::min(summed_token_count_, start + kPageTokenCount);
  const bool full = end % kPageTokenCount == 0;  // the page has another kind of sum
  uint64_t open_sum = 0;
  for (int h = 0; h < kv_head_count() && token_count > start; ++h) {
    sums[h] = full || token_count - start < end - token_count
                  ? SumOfRows(h, start, token_count)
                  : record_->PageSum(h, page) - SumOfRows(h, token_count, end);
    open_sum += sums[h];
  }
  if (record_->token_count() > token_count) record_->SetTokenCount(token_count, open_sum);
  // Not before: until then the page may be one that counts as full.
  for (int h = 0; h < kv_head_count() && token_count > start; ++h) {
    record_->SetPageSum(h, page, sums[h]);
  }
  summed_token_count_ = token_count;
}

}  // namespace spillway
