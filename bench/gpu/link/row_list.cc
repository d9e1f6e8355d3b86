#include "bench/gpu/link/row_list.h"

#include <algorithm>
#include <bit>
#include <cassert>

#include "host/core/keyed_hash.h"
#include "tbb/blocked_range.h"
#include "tbb/parallel_for.h"
#include "tbb/parallel_sort.h"

namespace spillway::bench {

Permutation::Permutation(uint64_t count, uint64_t seed) : count_(count) {
  assert(count > 0 && count <= uint64_t{1} << 32);
  const int bits = std::max(static_cast<int>(std::bit_width(count - 1)), 1);
  mask_ = (uint64_t{1} << bits) - 1;
  shift_ = (bits + 1) / 2;
  for (int round = 0; round < kRounds; ++round) {
    seed = SplitMix64(seed);
    multipliers_[round] = seed | 1;
    addends_[round] = seed >> 32;
  }
}

uint64_t Permutation::operator()(uint64_t i) const {
  // Each round is a bijection on [0, mask_]. If the result is not below count_, the rounds are
  // applied again. This gives a bijection on [0, count_), in fewer than two passes on average.
  do {
    for (int round = 0; round < kRounds; ++round) {
      i = (i * multipliers_[round] + addends_[round]) & mask_;
      i ^= i >> shift_;
    }
  } while (i >= count_);
  return i;
}

std::vector<uint32_t> DrawRows(const Measurement& m, Way way, int repetition) {
  const auto count = static_cast<uint64_t>(m.row_count);
  const auto domain = static_cast<uint64_t>(m.domain_row_count);
  const auto span = static_cast<uint64_t>(m.span_row_count());
  assert(0 < count && count <= domain && domain <= span);
  const auto turn = static_cast<uint64_t>(repetition);
  // Consecutive repetitions use different parts of the span, and in the same part different
  // stretches of its permutation.
  const uint64_t base = turn % (span / domain) * domain + (way == Way::kSecond ? span : 0);
  const uint64_t first = turn * count % domain;
  const Permutation permutation(domain, static_cast<uint64_t>(way) + 1);
  std::vector<uint32_t> rows(count);
  tbb::parallel_for(tbb::blocked_range<uint64_t>(0, count, 1 << 12), [&](const auto& range) {
    for (uint64_t i = range.begin(); i < range.end(); ++i) {
      const uint64_t at = first + i;
      rows[i] = static_cast<uint32_t>(base + permutation(at < domain ? at : at - domain));
    }
  });
  if (m.order == Order::kSorted) tbb::parallel_sort(rows.begin(), rows.end());
  return rows;
}

}  // namespace spillway::bench
