#include "host/cpu/score_pass.h"

#include <algorithm>
#include <memory>
#include <utility>

#include "host/base/parallel.h"

namespace spillway {
namespace {

// Histogram sets per block: the group's, and with top-p one per query head.
int SetsPerBlock(bool by_mass, int group) { return by_mass ? 1 + group : 1; }

void CountBins(const uint16_t* bins, int64_t count, uint32_t* histogram, int bin_count) {
  // Two interleaved histograms: neighbours often share a bin.
  std::vector<uint32_t> odd(bin_count, 0);
  int64_t i = 0;
  for (; i + 2 <= count; i += 2) {
    ++histogram[bins[i]];
    ++odd[bins[i + 1]];
  }
  if (i < count) ++histogram[bins[i]];
  for (int b = 0; b < bin_count; ++b) histogram[b] += odd[b];
}

}  // namespace

ScorePass::ScorePass(const AttendContext& context, int64_t query, int kv_head, int64_t begin,
                     int64_t end)
    : context_(context),
      query_(query),
      kv_head_(kv_head),
      begin_(begin),
      end_(end),
      base_(begin / (2 * kTileTokenCount) * (2 * kTileTokenCount)),
      first_block_(begin / kBlockTokens),
      block_count_((end - 1) / kBlockTokens - first_block_ + 1) {}

absl::Status ScorePass::ScoreBlock(int64_t block) {
  const absl::Status cancelled = context_.CheckCancelled();
  if (!cancelled.ok()) return cancelled;
  const int group = context_.spec().group();
  const int64_t from = block_begin(block);
  const int64_t to = block_end(block);
  for (int64_t page = from / kPageTokenCount; page * kPageTokenCount < to; ++page) {
    const int64_t at = page * kPageTokenCount;
    // Kernels take tiles in pairs.
    const int tile_begin =
        static_cast<int>(std::max<int64_t>(from - at, 0) / (2 * kTileTokenCount) * 2);
    const int tile_end =
        static_cast<int>((std::min<int64_t>(to - at, kPageTokenCount) + 2 * kTileTokenCount - 1) /
                         (2 * kTileTokenCount) * 2);
    const int64_t slot = at + tile_begin * kTileTokenCount - base_;
    uint16_t* head_bins[kGroupMax];
    for (int g = 0; by_mass_ && g < group; ++g) {
      head_bins[g] = workspace_->head_bins[g].data() + slot;
    }
    absl::Status status = scorer_->Bins(page, tile_begin, tile_end, workspace_->bins.data() + slot,
                                        by_mass_ ? head_bins : nullptr);
    if (!status.ok()) return status;
  }
  if (!candidates_.empty()) DropOthers(block);
  CountBlock(block);
  return absl::OkStatus();
}

void ScorePass::DropOthers(int64_t block) {
  const auto drop = [&](std::vector<uint16_t>& bins) {
    int64_t next = block_begin(block);
    for (const uint32_t token : candidates_[block]) {
      std::fill(bins.begin() + next - base_, bins.begin() + token - base_, kNotFoundBin);
      next = token + int64_t{1};
    }
    std::fill(bins.begin() + next - base_, bins.begin() + block_end(block) - base_, kNotFoundBin);
  };
  drop(workspace_->bins);
  for (int g = 0; by_mass_ && g < context_.spec().group(); ++g) drop(workspace_->head_bins[g]);
}

void ScorePass::CountBlock(int64_t block) {
  const int group = context_.spec().group();
  const int sets = SetsPerBlock(by_mass_, group);
  uint32_t* histogram = workspace_->histograms.data() + block * sets * bin_count_;
  std::fill_n(histogram, static_cast<size_t>(sets) * bin_count_, 0u);
  const int64_t from = block_begin(block) - base_;
  const int64_t count = block_end(block) - block_begin(block);
  CountBins(workspace_->bins.data() + from, count, histogram, bin_count_);
  for (int g = 0; g + 1 < sets; ++g) {
    CountBins(workspace_->head_bins[g].data() + from, count, histogram + (g + 1) * bin_count_,
              bin_count_);
  }
}

absl::Status ScorePass::ScoreBy(Selector selector, bool by_mass) {
  by_mass_ = by_mass;
  scorer_.emplace(context_, selector, q_, kv_head_, begin_, end_);
  absl::Status prepared = scorer_->Prepare();
  if (!prepared.ok()) return prepared;
  bin_count_ = scorer_->bin_count();
  std::vector<absl::Status> statuses(block_count_);
  ParallelFor(int64_t{0}, block_count_, [&](int64_t b) { statuses[b] = ScoreBlock(b); });
  for (const absl::Status& status : statuses) {
    if (!status.ok()) return status;
  }
  histogram_ = SumHistograms(0);
  return absl::OkStatus();
}

absl::Status ScorePass::Score() {
  const ModelSpec& spec = context_.spec();
  const Policy& policy = context_.attend->policy;
  const bool by_mass = policy.heavy_kind == HeavyKind::kMass;
  q_ = GroupQueries(context_, kv_head_, query_, query_ + 1);
  // Of hamming as many bins as there are bits, mostly fewer than of the others.
  const int bins_max = std::max(kScoreBinCount, spec.match_bin_count());
  // The last pair of tiles may be scored whole.
  auto lease =
      context_.workspaces->Acquire(end_ - base_ + 2 * kTileTokenCount, by_mass ? spec.group() : 0,
                                   block_count_ * SetsPerBlock(by_mass, spec.group()) * bins_max);
  if (!lease.ok()) return lease.status();
  workspace_holder_.emplace(*std::move(lease));
  workspace_ = &**workspace_holder_;
  if (policy.candidate_selector.has_value()) {
    absl::Status status = ScoreBy(*policy.candidate_selector, /*by_mass=*/false);
    if (!status.ok()) return status;
    std::vector<std::vector<uint32_t>> found(block_count_);
    const int64_t count = policy.CandidateCount(context_.attend->visible[query_]);
    CollectAbove(0, HeavyByCount(histogram_, count), found);
    candidates_ = std::move(found);
  }
  return ScoreBy(policy.selector, by_mass);
}

std::vector<uint32_t> ScorePass::SumHistograms(int set) const {
  const int sets = SetsPerBlock(by_mass_, context_.spec().group());
  std::vector<uint32_t> total(bin_count_, 0);
  for (int64_t b = 0; b < block_count_; ++b) {
    const uint32_t* h = workspace_->histograms.data() + (b * sets + set) * bin_count_;
    for (int i = 0; i < bin_count_; ++i) total[i] += h[i];
  }
  return total;
}

void ScorePass::CollectAbove(int set, HeavyThreshold threshold,
                             std::vector<std::vector<uint32_t>>& found) const {
  const int sets = SetsPerBlock(by_mass_, context_.spec().group());
  const std::vector<uint16_t>& bins = set == 0 ? workspace_->bins : workspace_->head_bins[set - 1];
  // Of the threshold bin the most recent `take` are heavy: the first `skip`
  // in token order are not.
  std::vector<int64_t> skip(block_count_);
  int64_t in_bin = 0;
  for (int64_t b = 0; b < block_count_; ++b) {
    skip[b] = in_bin;
    in_bin += workspace_->histograms[(b * sets + set) * bin_count_ + threshold.bin];
  }
  for (int64_t& s : skip) s = in_bin - threshold.take - s;
  ParallelFor(int64_t{0}, block_count_, [&](int64_t b) {
    const int64_t from = block_begin(b);
    const auto positions = std::make_unique_for_overwrite<uint32_t[]>(block_end(b) - from);
    const uint16_t* first = bins.data() + from - base_;
    const int64_t count = FilterBins(first, block_end(b) - from,
                                     static_cast<uint16_t>(threshold.bin), positions.get());
    int64_t seen = 0;
    for (int64_t i = 0; i < count; ++i) {
      if (first[positions[i]] == threshold.bin && seen++ < skip[b]) continue;
      found[b].push_back(static_cast<uint32_t>(from + positions[i]));
    }
  });
}

std::vector<uint32_t> ScorePass::TakeHeavy() {
  const Policy& policy = context_.attend->policy;
  std::vector<std::vector<uint32_t>> found(block_count_);
  if (by_mass_) {
    for (int g = 0; g < context_.spec().group(); ++g) {
      CollectAbove(g + 1,
                   HeavyByMass(SumHistograms(g + 1), policy.heavy_mass, policy.heavy_floor,
                               policy.heavy_ceiling),
                   found);
    }
  } else {
    const int64_t count = policy.HeavyCount(context_.attend->visible[query_]);
    CollectAbove(0, HeavyByCount(histogram_, count), found);
  }
  std::vector<uint32_t> heavy;
  for (std::vector<uint32_t>& block : found) {
    if (by_mass_) {  // the union over the group
      std::sort(block.begin(), block.end());
      block.erase(std::unique(block.begin(), block.end()), block.end());
    }
    heavy.insert(heavy.end(), block.begin(), block.end());
  }
  for (uint32_t token : heavy) {
    uint16_t& bin = workspace_->bins[token - base_];
    --histogram_[bin];
    bin = kHeavyBin;
  }
  return heavy;
}

}  // namespace spillway
