#pragma once

#include <cstddef>
#include <cstdint>

namespace spillway {

// Of each of a page's 128 keys, how many of its buckets are the query's:
// counts [128]. query: [table_count]; buckets: [table_count][128]. Picks the
// best instruction set of the machine.
void CountShared(const uint16_t* query, int table_count, const std::byte* buckets,
                 uint16_t* counts);

}  // namespace spillway
