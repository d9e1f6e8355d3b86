#pragma once

#include <cstdint>

namespace spillway {

// Most query heads of a group (ModelSpec::group()), and largest head_dim.
inline constexpr int kGroupMax = 16;
inline constexpr int kHeadDimMax = 256;
// Consecutive rows of one KV head that are allocated together.
inline constexpr int kPageTokenCount = 128;
// Codes exist once a layer has this many tokens. The usual distances of keys and values are
// measured on these first tokens. For optional methods, the mean of their keys is the centre of a
// KV head.
inline constexpr int64_t kCentreTokenCount = 1024;
// Most tokens of one sequence.
inline constexpr int64_t kTokenCountMax = 0xFFFFFFFF;
// Attends with more queries than this use exact attention.
inline constexpr int kSparseQueryCountMax = 16;
// Most sequences of one attend.
inline constexpr int kAttendItemCountMax = 256;
// Most strata of a tail.
inline constexpr int kTailStrataMax = 48;
// Fewest rows from which the variance of a stratum is estimated.
inline constexpr int kStratumRowsMin = 8;

}  // namespace spillway
