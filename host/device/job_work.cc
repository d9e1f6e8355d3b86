#include "host/device/job_work.h"

#include <algorithm>

#include "host/device/results.h"

namespace spillway {
namespace {

// Rows that one sparse query reads, in tokens (each of all KV heads).
int64_t RowsRead(const Policy& policy, int64_t visible) {
  constexpr int64_t kShareOfRows = 4;
  if (policy.row_count_max > 0) return std::min(policy.row_count_max, visible);
  const int64_t least =
      policy.sink_token_count + policy.window_token_count + policy.HeavyCount(visible);
  return std::min(visible, std::max(least, visible / kShareOfRows));
}

int64_t TokenBytes(const Job& job) {
  const ModelSpec& spec = job.model->spec();
  return spec.kv_head_count * spec.row_bytes();
}

}  // namespace

int64_t RowBytes(const Job& job) {
  const int64_t groups = job.model->spec().groups_per_kv_head();
  int64_t tokens = 0;
  for (const JobItem& item : job.items) {
    if (item.append) tokens += item.append->count;
    if (!item.attend) continue;
    for (const int64_t visible : item.attend->visible) tokens += groups * visible;
  }
  return tokens * TokenBytes(job);
}

int64_t WorkOf(const Job& job, int64_t index_token_bytes) {
  const ModelSpec& spec = job.model->spec();
  const int64_t groups = spec.groups_per_kv_head();
  int64_t rows = 0;
  int64_t scored = 0;
  for (const JobItem& item : job.items) {
    if (item.append) rows += item.append->count * (spec.has_index() ? kIndexedRowReads : 1);
    if (!item.attend) continue;
    const AttendQuery& attend = *item.attend;
    CutQueries(
        spec, attend, job.layer,
        [&](int64_t begin, int64_t end) {
          for (int64_t t = begin; t < end; ++t) rows += groups * attend.visible[t];
        },
        [&](int64_t t) {
          scored += groups * attend.visible[t];
          rows += groups * RowsRead(attend.policy, attend.visible[t]);
        });
  }
  return rows * TokenBytes(job) + scored * index_token_bytes;
}

}  // namespace spillway
