#include "host/cpu/tail_sampler.h"

#include <algorithm>
#include <memory>

#include "host/cpu/parallel.h"

namespace spillway {

TailSampler::TailSampler(const ScorePass& scores, const Strata& strata, const SampleKey& key,
                         uint32_t phase)
    : scores_(scores), strata_(strata), key_(key), phase_(phase) {
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
  // The near strata are few tokens with high rates, looked at one by one; the
  // far ones are many with low rates and go through the vector filter.
  const int64_t few = (scores_.block_end(scores_.block_count() - 1) - scores_.block_begin(0)) / 32;
  size_t far = 0;
  for (int64_t near = 0; far < strata_count && near + strata_.counts[far] <= few; ++far) {
    near += strata_.counts[far];
  }
  // Only those that widen: of the near ones from the farthest on, of the far
  // ones to the highest rate.
  const auto widens = [&](size_t h) { return thresholds[h] > thresholds_[h]; };
  size_t near_end = far;
  while (near_end > 0 && !widens(near_end - 1)) --near_end;
  const std::vector<uint8_t>& of_bin = strata_.of_bin;
  const auto near_begin =
      std::find_if(of_bin.begin(), of_bin.end(), [&](uint8_t h) { return h < near_end; });
  const uint16_t near_bin = static_cast<uint16_t>(near_begin - of_bin.begin());
  uint64_t far_threshold = 0;
  for (size_t h = far; h < strata_count; ++h) {
    if (widens(h)) far_threshold = std::max(far_threshold, thresholds[h]);
  }
  std::vector<std::vector<uint32_t>> drawn(strata_count);
  if (near_end == 0 && far_threshold == 0) return drawn;

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
    const int64_t kept = FilterTokens(bins, static_cast<uint32_t>(from), count, near_bin, key_,
                                      phase_, far_threshold, positions.get());
    for (int64_t i = 0; i < kept; ++i) {
      const uint16_t bin = bins[positions[i]];
      if (bin == ScorePass::kHeavyBin) continue;
      const uint8_t h = of_bin[bin];
      const uint32_t token = static_cast<uint32_t>(from + positions[i]);
      const uint64_t x = TokenHash(key_, token) - phase_;
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

}  // namespace spillway
