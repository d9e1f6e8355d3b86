#pragma once

#include <cstdint>

#include "host/cpu/kernels.h"

namespace spillway {

// Computes the bins of tiles [tile_begin, tile_end) of a page of codes, 16 bins per tile: matching
// bits summed over the group. Uses the top bit of each dimension of a code. tile_begin and tile_end
// are even. query: one row of weights. Uses the best instruction set of the machine.
void HammingBins(const ScoreQuery& query, const ScanPage& page, int tile_begin, int tile_end,
                 uint16_t* bins);

}  // namespace spillway
