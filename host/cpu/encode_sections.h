#pragma once

#include <cstddef>

#include "host/cpu/cpu_state.h"

namespace spillway {

// Indexes keys [begin, end) of a page of one KV head beside their codes; see
// KeySections. rows: the page's rows; centre: [d]; sections: of the index
// page. Bounds are taken of all the keys below `end` that share a page with
// one of them.
void EncodeSections(const CpuModel& model, int layer, int kv_head, const std::byte* rows, int begin,
                    int end, const float* centre, std::byte* sections);

// Buckets of one vector [d]: [lsh_table_count].
void LshBuckets(const CpuModel& model, int layer, const float* x, uint16_t* buckets);

}  // namespace spillway
