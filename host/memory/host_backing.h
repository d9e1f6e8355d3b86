#pragma once

#include <memory>

#include "absl/status/statusor.h"
#include "host/memory/arena.h"

namespace spillway {

// Host memory for an arena: one private anonymous mapping of limit_bytes, a
// whole number of slabs, or a mapping of the file, at the same offsets, that keeps the file's
// contents; advised to use huge pages, bound to the NUMA node (-1: none) and touched by
// thread_count threads as it is committed.
absl::StatusOr<std::unique_ptr<ArenaBacking>> CreateHostBacking(int64_t limit_bytes, int numa_node,
                                                                int thread_count,
                                                                Arena::ExtentObserver observer,
                                                                std::unique_ptr<ArenaFile> file);

// In huge pages, of the mappings that lie in [begin, end), from smaps.
int64_t HugePageBytes(const std::byte* begin, const std::byte* end);

}  // namespace spillway
