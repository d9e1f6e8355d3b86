#include "host/core/histogram.h"

#include <algorithm>
#include <cmath>
#include <numeric>

namespace spillway {

HeavyThreshold HeavyByCount(std::span<const uint32_t> counts, int64_t count) {
  int64_t above = 0;
  for (int bin = static_cast<int>(counts.size()) - 1; bin >= 0; --bin) {
    if (above + counts[bin] >= count) return {bin, count - above};
    above += counts[bin];
  }
  return {0, counts.empty() ? 0 : static_cast<int64_t>(counts[0])};
}

HeavyThreshold HeavyByMass(std::span<const uint32_t> counts, double mass, int64_t floor,
                           int64_t ceiling) {
  std::vector<uint16_t> bins;
  std::vector<uint32_t> used;
  for (size_t bin = 0; bin < counts.size(); ++bin) {
    if (counts[bin] == 0) continue;
    bins.push_back(static_cast<uint16_t>(bin));
    used.push_back(counts[bin]);
  }
  return HeavyByMass(bins, used, mass, floor, ceiling);
}

Strata CutStrata(std::span<const uint32_t> counts, int64_t heavy_count) {
  Strata strata;
  strata.of_bin.assign(counts.size(), 0);
  const int64_t tail = std::accumulate(counts.begin(), counts.end(), int64_t{0});
  int64_t rank = heavy_count;      // tokens above the current bin
  int64_t edge = 2 * heavy_count;  // where the open stratum ends
  int64_t open = 0;                // tokens in the open stratum
  int64_t left = tail;
  bool last = false;
  uint8_t id = 0;
  for (int bin = static_cast<int>(counts.size()) - 1; bin >= 0; --bin) {
    strata.of_bin[bin] = id;
    open += counts[bin];
    rank += counts[bin];
    left -= counts[bin];
    if (last || rank < edge || left == 0) continue;
    strata.counts.push_back(open);
    open = 0;
    ++id;
    last = left * 10 < tail;
    while (edge <= rank) edge *= 2;
  }
  if (open > 0) strata.counts.push_back(open);
  return strata;
}

}  // namespace spillway
