#include "host/core/histogram.h"

#include <algorithm>

#include "host/core/tail_plan.h"

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
  const int bins = static_cast<int>(counts.size());
  std::vector<int64_t> above(counts.size());  // tokens of a bin and above
  int64_t tail_count = 0;
  for (int bin = bins - 1; bin >= 0; --bin) above[bin] = tail_count += counts[bin];
  Strata strata;
  strata.of_bin.resize(counts.size());
  const auto edge_bin = [&](int edge) -> EdgeBin {
    const int bin =
        LastBinReaching(bins, StratumEdge(heavy_count, edge), [&](int b) { return above[b]; });
    return {bin, bin < 0 ? 0 : above[bin]};
  };
  int end = bins;  // of the open stratum
  CutStrata(tail_count, heavy_count, edge_bin, [&](int stratum, int lowest_bin, int64_t count) {
    std::fill(strata.of_bin.begin() + lowest_bin, strata.of_bin.begin() + end,
              static_cast<uint8_t>(stratum));
    end = lowest_bin;
    strata.lowest_bin.push_back(static_cast<uint16_t>(lowest_bin));
    strata.counts.push_back(count);
  });
  return strata;
}

Strata OneStratum(size_t bin_count, int64_t token_count) {
  return {std::vector<uint8_t>(bin_count, 0), {0}, {token_count}};
}

}  // namespace spillway
