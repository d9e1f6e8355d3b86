#pragma once

#include <algorithm>
#include <cstdint>

#include "host/base/parallel.h"
#include "host/device/device.h"

namespace spillway {

// Copies what an append brings into its rows, prepared before, in parallel,
// and commits them.
inline void AppendRows(const AppendWork& work) {
  const int heads = work.rows->kv_head_count();
  // A page's worth at a time; a few tokens are copied before a worker would wake.
  const int64_t pages = (work.count + kPageTokenCount - 1) / kPageTokenCount;
  const auto copy = [&](int64_t task) {
    const int64_t from = task % pages * kPageTokenCount;
    work.rows->WriteRows(static_cast<int>(task / pages), work.start, work.count, from,
                         std::min<int64_t>(from + kPageTokenCount, work.count), work.k, work.v);
  };
  if (pages == 1) {
    for (int64_t task = 0; task < heads; ++task) copy(task);
  } else {
    ParallelFor(int64_t{0}, heads * pages, copy);
  }
  work.rows->Commit(work.start + work.count);
}

}  // namespace spillway
