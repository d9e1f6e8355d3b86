#pragma once

#include <cstdint>
#include <vector>

#include "bench/gpu/link/plan.h"

namespace spillway::bench {

// Which of a both-ways measurement's two lists is meant; a one-way
// measurement has the first alone.
enum class Way { kFirst, kSecond };

// Row numbers of one repetition, [m.row_count]: distinct, below the rows of
// the span, ascending for Order::kSorted. The two ways of kBoth never share a
// row. Repetitions share rows only once all of the domain has been used, so
// that no cache holds what is read. The same arguments give the same list.
// Thread-safe; runs on oneTBB's threads.
std::vector<uint32_t> DrawRows(const Measurement& m, Way way, int repetition);

// A bijection of [0, count) that looks random: row i of a shuffled list
// without the memory of shuffling billions.
class Permutation {
 public:
  // REQUIRES: 0 < count <= 2^32.
  Permutation(uint64_t count, uint64_t seed);
  // REQUIRES: i < count.
  uint64_t operator()(uint64_t i) const;

 private:
  static constexpr int kRounds = 4;
  uint64_t count_;
  uint64_t mask_;  // 2^bits - 1, the smallest that holds count - 1
  int shift_;
  uint64_t multipliers_[kRounds];  // odd
  uint64_t addends_[kRounds];
};

}  // namespace spillway::bench
