#pragma once

#include <cstdint>
#include <vector>

#include "bench/gpu/link/plan.h"

namespace spillway::bench {

// Selects a list of rows. A measurement in both directions has two lists; other measurements have
// only the first.
enum class Way { kFirst, kSecond };

// Row numbers of one repetition, [m.row_count]: distinct, below the number of rows of the span, and
// ascending for Order::kSorted. The two directions of kBoth never share a row. Repetitions do not
// share rows before the whole domain has been used, so that no cache holds the rows that are read.
// The same arguments give the same list. Thread-safe; runs on oneTBB's threads.
std::vector<uint32_t> DrawRows(const Measurement& m, Way way, int repetition);

// A pseudo-random bijection on [0, count). Gives element i of a shuffled list without storing the
// list, which may have billions of elements.
class Permutation {
 public:
  // REQUIRES: 0 < count <= 2^32.
  Permutation(uint64_t count, uint64_t seed);
  // REQUIRES: i < count.
  uint64_t operator()(uint64_t i) const;

 private:
  static constexpr int kRounds = 4;
  uint64_t count_;
  uint64_t mask_;  // the smallest 2^bits - 1 that is at least count - 1
  int shift_;
  uint64_t multipliers_[kRounds];  // odd
  uint64_t addends_[kRounds];
};

}  // namespace spillway::bench
