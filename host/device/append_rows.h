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
  // Chunks of a page; a few tokens are copied before a worker would wake.
  const int64_t chunks = (work.count + kPageTokenCount - 1) / kPageTokenCount;
  const auto copy = [&](int64_t task) {
    const int64_t from = task % chunks * kPageTokenCount;
    work.rows->WriteRows(static_cast<int>(task / chunks), work.start, work.count, from,
                         std::min<int64_t>(from + kPageTokenCount, work.count), work.k, work.v);
  };
  if (chunks == 1) {
    for (int64_t task = 0; task < heads; ++task) copy(task);
  } else {
    ParallelFor(int64_t{0}, heads * chunks, copy);
  }
  work.rows->Commit(work.start + work.count);
}

}  // namespace spillway
