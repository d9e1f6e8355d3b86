#include "host/cpu/tail_sampler.h"

#include <memory>

#include "host/base/parallel.h"

namespace spillway {

std::vector<std::vector<uint32_t>> TailSampler::Draw(std::span<const uint64_t> low,
                                                     std::span<const uint64_t> high) const {
  const SampleLimits limits = Limits(low, high);
  std::vector<std::vector<uint32_t>> drawn(strata_.size());
  if (limits.count == 1 && limits.limit[0] == 0) return drawn;

  struct Drawn {
    uint32_t token;
    uint8_t stratum;
  };
  std::vector<std::vector<Drawn>> blocks(scores_.block_count());
  ParallelFor(int64_t{0}, scores_.block_count(), [&](int64_t b) {
    const int64_t from = scores_.block_begin(b);
    const int64_t count = scores_.block_end(b) - from;
    const uint16_t* bins = scores_.bins(from);
    const auto positions = std::make_unique_for_overwrite<uint32_t[]>(count);
    const int64_t kept =
        FilterTokens(bins, static_cast<uint32_t>(from), count, order_, limits, positions.get());
    for (int64_t i = 0; i < kept; ++i) {
      const uint8_t h = strata_.of_bin[bins[positions[i]]];
      const uint32_t token = static_cast<uint32_t>(from + positions[i]);
      const uint64_t place = SamplePlace(order_, token);
      if (place >= low[h] && place < high[h]) blocks[b].push_back({token, h});
    }
  });
  for (const std::vector<Drawn>& block : blocks) {
    for (const Drawn& d : block) drawn[d.stratum].push_back(d.token);
  }
  return drawn;
}

SampleLimits TailSampler::Limits(std::span<const uint64_t> low,
                                 std::span<const uint64_t> high) const {
  SampleLimits limits;
  const auto add = [&](size_t bin, uint16_t limit) {
    if (limits.count > 0 && limits.limit[limits.count - 1] == limit) return;
    limits.edge[limits.count] = static_cast<uint16_t>(bin);
    limits.limit[limits.count++] = limit;
  };
  // Bins ascend as strata descend.
  for (int h = strata_.size(); h-- > 0;) {
    add(strata_.lowest_bin[h], high[h] > low[h] ? PlaceLimit(high[h]) : uint16_t{0});
  }
  // Heavy tokens' bin lies above all.
  add(strata_.of_bin.size(), 0);
  return limits;
}

}  // namespace spillway
