#pragma once

#include <memory>

#include "absl/status/statusor.h"
#include "host/memory/arena.h"

namespace spillway {

// Host memory for an arena, limit_bytes long, which must be whole slabs. It is one private
// anonymous mapping, or a mapping of `file` at the same offsets, which keeps the file's contents.
// It is advised to use huge pages and bound to the NUMA node (-1: not bound). thread_count threads
// touch it as it is committed.
absl::StatusOr<std::unique_ptr<ArenaBacking>> CreateHostBacking(int64_t limit_bytes, int numa_node,
                                                                int thread_count,
                                                                Arena::ExtentObserver observer,
                                                                std::unique_ptr<ArenaFile> file);

// Bytes in huge pages, of the mappings that lie in [begin, end); from smaps.
int64_t HugePageBytes(const std::byte* begin, const std::byte* end);

}  // namespace spillway
