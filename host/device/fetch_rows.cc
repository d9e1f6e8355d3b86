#include "host/device/fetch_rows.h"

#include <algorithm>

#include "host/base/limits.h"
#include "host/base/parallel.h"

namespace spillway {
namespace {

// Rows of one KV head that a task copies, at most.
constexpr int64_t kTaskRows = kPageTokenCount;

// Copies chosen tokens [from, to) of a KV head. first: target row of the head's first chosen token.
void ReadChosen(const FetchWork& work, int kv_head, int64_t first, int64_t from, int64_t to) {
  const std::vector<uint32_t>& tokens = (*work.chosen)[kv_head];
  for (int64_t i = from; i < to; ++i) {
    work.rows.ReadRow(kv_head, tokens[i], work.k.Row(0, first + i), work.v.Row(0, first + i));
  }
}

}  // namespace

int64_t FetchWork::row_count() const {
  if (!chosen) return count * rows.kv_head_count();
  int64_t sum = 0;
  for (const std::vector<uint32_t>& tokens : *chosen) sum += static_cast<int64_t>(tokens.size());
  return sum;
}

absl::Status FetchRows(const FetchWork& work) {
  if (work.on_gpu) {
    return absl::InvalidArgumentError("k and v are in GPU memory, which the device cannot write");
  }
  const int heads = work.rows.kv_head_count();
  const auto count = [&](int head) {
    return work.chosen ? static_cast<int64_t>((*work.chosen)[head].size()) : work.count;
  };
  // For each head: its first task, and the target row of its first chosen token.
  std::vector<int64_t> tasks(heads + 1, 0), firsts(heads, 0);
  for (int h = 0; h < heads; ++h) {
    tasks[h + 1] = tasks[h] + (count(h) + kTaskRows - 1) / kTaskRows;
    if (h > 0) firsts[h] = firsts[h - 1] + count(h - 1);
  }
  const auto cancelled = [&] { return work.cancel != nullptr && !work.cancel->Check().ok(); };
  const auto copy = [&](int64_t task) {
    if (cancelled()) return;
    const auto after = std::upper_bound(tasks.begin(), tasks.end(), task);
    const int head = static_cast<int>(after - tasks.begin()) - 1;
    const int64_t from = (task - tasks[head]) * kTaskRows;
    const int64_t to = std::min(from + kTaskRows, count(head));
    if (work.chosen) {
      ReadChosen(work, head, firsts[head], from, to);
    } else {
      work.rows.ReadRows(head, work.start, from, to, work.k, work.v);
    }
  };
  Isolated([&] { ParallelFor(int64_t{0}, tasks.back(), copy); });
  return work.cancel != nullptr ? work.cancel->Check() : absl::OkStatus();
}

}  // namespace spillway
