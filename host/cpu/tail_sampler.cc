#include "host/cpu/tail_sampler.h"

#include <algorithm>
#include <memory>

#include "host/base/parallel.h"

namespace spillway {

std::vector<std::vector<uint32_t>> TailSampler::Draw(std::span<const uint64_t> low,
                                                     std::span<const uint64_t> high) {
  // Scanning all tokens costs more than keeping a few too many. So the first scan collects more
  // than the pilot needs, which also serves the later draws unless they are much larger.
  constexpr uint64_t kAhead = 8;
  constexpr uint64_t kAll = uint64_t{1} << 32;
  const uint64_t factor = candidates_.empty() ? kAhead : 1;
  bool beyond = candidates_.empty();
  for (size_t h = 0; h < high.size(); ++h) beyond |= high[h] > collected_[h];
  if (beyond) {
    for (size_t h = 0; h < high.size(); ++h) {
      collected_[h] = std::max(collected_[h], std::min(kAll, factor * high[h]));
    }
    Collect();
  }
  std::vector<std::vector<uint32_t>> drawn(strata_.size());
  for (const std::vector<Candidate>& block : candidates_) {
    for (const Candidate& c : block) {
      if (c.place >= low[c.stratum] && c.place < high[c.stratum]) {
        drawn[c.stratum].push_back(c.token);
      }
    }
  }
  return drawn;
}

void TailSampler::Collect() {
  const SampleLimits limits = Limits();
  candidates_.assign(scores_.block_count(), {});
  if (limits.count == 1 && limits.limit[0] == 0) return;
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
      if (place < collected_[h]) candidates_[b].push_back({token, h, place});
    }
  });
}

SampleLimits TailSampler::Limits() const {
  SampleLimits limits;
  const auto add = [&](size_t bin, uint16_t limit) {
    if (limits.count > 0 && limits.limit[limits.count - 1] == limit) return;
    limits.edge[limits.count] = static_cast<uint16_t>(bin);
    limits.limit[limits.count++] = limit;
  };
  // From the last stratum to the first, so that bins ascend.
  for (int h = strata_.size(); h-- > 0;) add(strata_.lowest_bin[h], PlaceLimit(collected_[h]));
  // The bin of heavy tokens is above all these.
  add(strata_.of_bin.size(), 0);
  return limits;
}

}  // namespace spillway
