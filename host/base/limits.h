#pragma once

#include <cstdint>

namespace spillway {

// Query heads of a KV head, and elements of a key, at most.
inline constexpr int kGroupMax = 16;
inline constexpr int kHeadDimMax = 256;
// Consecutive rows of one KV head that are allocated together.
inline constexpr int kPageTokenCount = 128;
// Positions whose mean is the centre of a KV head's keys. Codes exist from the
// moment a layer holds this many tokens.
inline constexpr int64_t kCentreTokenCount = 1024;
// Tokens of one sequence.
inline constexpr int64_t kTokenCountMax = 0xFFFFFFFF;
// Queries of one attend that are served sparsely; more are served densely.
inline constexpr int kSparseQueryCountMax = 16;
// Most sequences of one attend.
inline constexpr int kAttendItemCountMax = 256;
// Strata of a tail, at most.
inline constexpr int kTailStrataMax = 48;
// Fewest rows a stratum's variance is estimated from.
inline constexpr int kStratumRowsMin = 8;

}  // namespace spillway
