#pragma once

#include <cstddef>
#include <cstdint>

namespace spillway {

// counts [128]: for each of a page's 128 keys, the number of tables in which key and query are in
// the same bucket. query: [table_count]. buckets: [table_count][128]. Uses the best instruction set
// of the machine.
void CountShared(const uint16_t* query, int table_count, const std::byte* buckets,
                 uint16_t* counts);

}  // namespace spillway
