#include "host/device/append_rows.h"

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <optional>
#include <span>
#include <vector>

#include "host/base/finite.h"
#include "host/base/limits.h"
#include "host/base/parallel.h"
#include "host/device/errors.h"

namespace spillway {
namespace {

// Writes rows [begin, end) of a KV head, of 8 bits, from copies of the source that the caller
// cannot change.
absl::Status WriteCopies(const ModelSpec& spec, int layer, const AppendWork& work, int kv_head,
                         int64_t begin, int64_t end) {
  const int64_t half = spec.element_row_bytes() / 2;
  std::vector<std::byte> copy(static_cast<size_t>(2 * half));
  const RowSource k = RowSource::Dense(copy.data(), 0, 0);
  const RowSource v = RowSource::Dense(copy.data() + half, 0, 0);
  for (int64_t token = begin; token < end; ++token) {
    std::memcpy(copy.data(), work.k.Row(kv_head, token - work.start), static_cast<size_t>(half));
    std::memcpy(copy.data() + half, work.v.Row(kv_head, token - work.start),
                static_cast<size_t>(half));
    if (const std::optional<int64_t> at = FindNonFinite(copy, spec.dtype)) {
      return NonFiniteRowError(*at < spec.head_dim ? "K" : "V", layer, kv_head,
                               static_cast<uint64_t>(token), *at % spec.head_dim);
    }
    work.rows->WriteRows(kv_head, token, 0, 1, k, v);
  }
  return absl::OkStatus();
}

// Checks rows [begin, end) of a KV head as they were written to the arena, which the caller cannot
// change.
absl::Status CheckWritten(const ModelSpec& spec, int layer, const LayerRows& rows, int kv_head,
                          int64_t begin, int64_t end) {
  for (int64_t token = begin; token < end;) {
    const int64_t run = std::min(end - token, kPageTokenCount - token % kPageTokenCount);
    const auto bytes = static_cast<size_t>(run * rows.row_bytes());
    const std::optional<int64_t> at = FindNonFinite({rows.Row(kv_head, token), bytes}, spec.dtype);
    if (at.has_value()) {
      const int64_t row_elements = 2 * int64_t{spec.head_dim};
      const int64_t element = *at % row_elements;
      return NonFiniteRowError(element < spec.head_dim ? "K" : "V", layer, kv_head,
                               static_cast<uint64_t>(token + *at / row_elements),
                               element % spec.head_dim);
    }
    token += run;
  }
  return absl::OkStatus();
}

}  // namespace

absl::Status AppendRows(const ModelSpec& spec, int layer, const AppendWork& work) {
  if (work.on_gpu) {
    return absl::InvalidArgumentError("K and V are in GPU memory, which the device cannot read");
  }
  if (work.rows_present) {
    work.rows->Commit(work.start + work.count);
    return absl::OkStatus();
  }
  const int heads = work.rows->kv_head_count();
  // One task copies the new rows of one page, of one KV head. With few rows, this thread copies
  // all: that is faster than waking a worker.
  const int64_t end = work.start + work.count;
  const int64_t first = work.start / kPageTokenCount;
  const int64_t pages = (end + kPageTokenCount - 1) / kPageTokenCount - first;
  const bool sum = work.rows->CanSum(work.start);
  std::vector<absl::Status> statuses(work.shared_source ? heads * pages : 0);
  const auto copy = [&](int64_t task) {
    const int head = static_cast<int>(task / pages);
    const int64_t page_start = (first + task % pages) * kPageTokenCount;
    const int64_t from = std::max(work.start, page_start);
    const int64_t to = std::min(end, page_start + kPageTokenCount);
    if (work.shared_source && spec.row_type == RowType::kInt8) {
      statuses[task] = WriteCopies(spec, layer, work, head, from, to);
    } else {
      work.rows->WriteRows(head, work.start, from - work.start, to - work.start, work.k, work.v);
      if (work.shared_source) {
        statuses[task] = CheckWritten(spec, layer, *work.rows, head, from, to);
      }
    }
    if (sum) work.rows->SumRows(head, from, to);
  };
  if (work.count <= kPageTokenCount) {
    for (int64_t task = 0; task < heads * pages; ++task) copy(task);
  } else {
    ParallelFor(int64_t{0}, heads * pages, copy);
  }
  // Also after an error: the rows are cut then, and with them their sums.
  if (sum) work.rows->SetSummed(end);
  for (absl::Status& status : statuses) {
    if (!status.ok()) return status;
  }
  work.rows->Commit(end);
  return absl::OkStatus();
}

}  // namespace spillway
