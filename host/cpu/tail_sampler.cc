#include "host/cpu/tail_sampler.h"

#include <algorithm>
#include <memory>

#include "host/base/parallel.h"

namespace spillway {

TailSampler::TailSampler(const ScorePass& scores, const Strata& strata, const SampleOrder& order)
    : scores_(scores), strata_(strata), order_(order), first_bin_(strata.counts.size()) {
  // Bins ascend as strata descend.
  for (size_t bin = strata.of_bin.size(); bin-- > 0;) {
    first_bin_[strata.of_bin[bin]] = static_cast<uint16_t>(bin);
  }
  Reset();
}

void TailSampler::Reset() {
  thresholds_.assign(strata_.counts.size(), 0);
  counts_.assign(strata_.counts.size(), 0);
}

std::vector<std::vector<uint32_t>> TailSampler::Draw(std::span<const int64_t> wanted) {
  std::vector<uint64_t> thresholds(thresholds_);
  for (size_t h = 0; h < thresholds.size(); ++h) {
    thresholds[h] = std::max(thresholds[h], SampleThreshold(wanted[h], strata_.counts[h]));
  }
  return DrawTo(thresholds);
}

std::vector<std::vector<uint32_t>> TailSampler::Widen(int64_t least) {
  std::vector<std::vector<uint32_t>> all(counts_.size());
  for (;;) {
    std::vector<uint64_t> thresholds(thresholds_);
    bool wider = false;
    for (size_t h = 0; h < thresholds.size(); ++h) {
      if (counts_[h] >= std::min(least, strata_.counts[h])) continue;
      thresholds[h] = std::min(std::max<uint64_t>(thresholds[h], 1) * 2, uint64_t{1} << 32);
      wider = true;
    }
    if (!wider) return all;
    std::vector<std::vector<uint32_t>> more = DrawTo(thresholds);
    for (size_t h = 0; h < all.size(); ++h) {
      all[h].insert(all[h].end(), more[h].begin(), more[h].end());
    }
  }
}

std::vector<std::vector<uint32_t>> TailSampler::DrawTo(std::span<const uint64_t> thresholds) {
  const size_t strata_count = strata_.counts.size();
  const SampleLimits limits = Limits(thresholds);
  std::vector<std::vector<uint32_t>> drawn(strata_count);
  if (limits.count == 1 && limits.limit[0] == 0) return drawn;

  struct Drawn {
    uint32_t token;
    uint8_t stratum;
  };
  std::vector<std::vector<Drawn>> blocks(scores_.block_count());
  const auto draw_block = [&](int64_t b) {
    const int64_t from = scores_.block_begin(b);
    const int64_t count = scores_.block_end(b) - from;
    const uint16_t* bins = scores_.bins(from);
    const auto positions = std::make_unique_for_overwrite<uint32_t[]>(count);
    const int64_t kept =
        FilterTokens(bins, static_cast<uint32_t>(from), count, order_, limits, positions.get());
    for (int64_t i = 0; i < kept; ++i) {
      const uint8_t h = strata_.of_bin[bins[positions[i]]];
      const uint32_t token = static_cast<uint32_t>(from + positions[i]);
      const uint64_t x = SamplePlace(order_, token);
      if (x >= thresholds_[h] && x < thresholds[h]) blocks[b].push_back({token, h});
    }
  };
  ParallelFor(int64_t{0}, scores_.block_count(), draw_block);
  for (const std::vector<Drawn>& block : blocks) {
    for (const Drawn& d : block) drawn[d.stratum].push_back(d.token);
  }
  for (size_t h = 0; h < strata_count; ++h) {
    counts_[h] += static_cast<int64_t>(drawn[h].size());
    thresholds_[h] = thresholds[h];
  }
  return drawn;
}

SampleLimits TailSampler::Limits(std::span<const uint64_t> thresholds) const {
  SampleLimits limits;
  const auto add = [&](size_t bin, uint16_t limit) {
    if (limits.count > 0 && limits.limit[limits.count - 1] == limit) return;
    limits.edge[limits.count] = static_cast<uint16_t>(bin);
    limits.limit[limits.count++] = limit;
  };
  for (size_t h = first_bin_.size(); h-- > 0;) {
    add(first_bin_[h], thresholds[h] > thresholds_[h] ? SampleLimits::Covering(thresholds[h]) : 0);
  }
  // Heavy tokens' bin lies above all.
  add(strata_.of_bin.size(), 0);
  return limits;
}

}  // namespace spillway
