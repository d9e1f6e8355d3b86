#pragma once

#include <cstdint>

#include "host/cpu/kernels.h"

namespace spillway {

// Bins of tiles [tile_begin, tile_end) of a page of codes, both even, 16 per
// tile: the matching bits (a code's top one) summed over the group. query: one
// row of weights. Picks the best instruction set of the machine.
void HammingBins(const ScoreQuery& query, const ScanPage& page, int tile_begin, int tile_end,
                 uint16_t* bins);

}  // namespace spillway
