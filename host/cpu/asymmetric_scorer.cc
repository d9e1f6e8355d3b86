#include "host/cpu/asymmetric_scorer.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>

#include "host/base/parallel.h"
#include "host/core/page_index.h"
#include "host/core/quantiser.h"
#include "host/core/query_code.h"
#include "host/core/score.h"
#include "host/core/value_code.h"
#include "host/cpu/logit_scorer.h"

namespace spillway {
namespace {

// Sums in the order that query_code.h prescribes.
float SumOfRuns(const std::vector<float>& terms) {
  float sum = 0;
  for (size_t first = 0; first < terms.size(); first += kQueryRun) {
    std::array<float, kQueryRun> run{};
    std::copy_n(terms.begin() + first, std::min<size_t>(kQueryRun, terms.size() - first),
                run.begin());
    for (int apart = kQueryRun / 2; apart > 0; apart /= 2) {
      for (int i = 0; i < apart; ++i) run[i] += run[i + apart];
    }
    sum += run[0];
  }
  return sum;
}

}  // namespace

AsymmetricScorer::AsymmetricScorer(const ScoredKeys& keys)
    : keys_(keys),
      first_page_(keys.begin / kPageTokenCount),
      page_count_((keys.end - 1) / kPageTokenCount - first_page_ + 1),
      pages_(page_count_ + 1),
      error_scale_(keys.spec().group()),
      centre_logits_(page_count_ * keys.spec().group()),
      page_sums_(page_count_ * keys.spec().group(), {0, 0}) {
  for (int64_t i = 0; i < page_count_; ++i) pages_[i] = keys.IndexPage(first_page_ + i);
}

void AsymmetricScorer::PrepareHead(int g) {
  const ModelSpec& spec = keys_.spec();
  const int d = spec.head_dim;
  const int dims = query_.layout.dims;
  const int bits = spec.hash.bits_per_dim;
  const auto softmax_scale = static_cast<float>(spec.softmax_scale);
  std::vector<float> rotated(d), errors(d);
  Rotate(keys_.model().encode_params(keys_.context->layer), keys_.queries->raw() + g * d,
         rotated.data());
  float largest = 0;
  for (const float y : rotated) largest = std::max(largest, std::fabs(y));
  const float step = QueryStep(largest);
  int32_t weight_sum = 0;
  for (int j = 0; j < d && step > 0; ++j) {
    const int level = QueryLevel(rotated[j], step);
    const int weight = QueryWeight(level);
    weights_[static_cast<size_t>(g) * dims + j] = static_cast<int8_t>(2 * weight);
    weight_sum += weight;
    errors[j] = QueryErrorSquare(rotated[j], level, step);
  }
  query_.offset[g] = QueryOffset(bits, weight_sum);
  query_.coefficient[g] = QueryCoefficient(softmax_scale, step, QuantiserStep(bits));
  for (float& y : rotated) y *= y;
  error_scale_[g] = RankErrorScale(double{softmax_scale}, QuantiserDistortion(bits),
                                   double{SumOfRuns(rotated)}, double{SumOfRuns(errors)});
}

void AsymmetricScorer::FindCentreLogits() {
  const ModelSpec& spec = keys_.spec();
  const int64_t offset = query_.layout.centre_offset_bytes();
  const int64_t centre_bytes = int64_t{2} * spec.head_dim;
  // Centres are a page apart, so the hardware does not prefetch them.
  constexpr int64_t kAhead = 4;
  constexpr int64_t kPagesPerTask = 128;
  const int64_t tasks = (page_count_ + kPagesPerTask - 1) / kPagesPerTask;
  ParallelFor(int64_t{0}, tasks, [&](int64_t task) {
    const int64_t end = std::min(page_count_, (task + 1) * kPagesPerTask);
    for (int64_t i = task * kPagesPerTask; i < end; ++i) {
      if (i + kAhead < end) {
        PrefetchRow(pages_[i + kAhead] + offset, centre_bytes);
      }
      CentreLogits(keys_.queries->raw(), spec.group(), spec.head_dim,
                   static_cast<float>(spec.softmax_scale), pages_[i] + offset,
                   centre_logits_.data() + i * spec.group());
    }
  });
}

absl::Status AsymmetricScorer::Prepare() {
  const ModelSpec& spec = keys_.spec();
  query_.layout = keys_.model().layout();
  query_.row_count = spec.group();
  weights_.assign(static_cast<size_t>(spec.group()) * query_.layout.dims, 0);
  query_.weights = weights_.data();
  for (int g = 0; g < spec.group(); ++g) PrepareHead(g);
  FindCentreLogits();
  return FindReferences(
      keys_,
      [&](int64_t page, int64_t next, float* logits) {
        AsymmetricLogits(query_, {PageOf(page), PageOf(next)}, PageCentreLogits(page), logits);
        const uint8_t* norms = NormsOf(page);
        for (int i = 0; i < kPageTokenCount; ++i) {
          if (norms[i] != kStrayNorm) continue;
          for (int g = 0; g < spec.group(); ++g) {
            logits[g * kPageTokenCount + i] = -kScoreLogitMax;
          }
        }
        return absl::OkStatus();
      },
      centre_logits_, query_.references);
}

bool AsymmetricScorer::MaskPage(int64_t page, PageMask& mask) const {
  const uint8_t* norms = NormsOf(page);
  const int64_t first = page * kPageTokenCount;
  if (first >= keys_.begin && first + kPageTokenCount <= keys_.end &&
      std::memchr(norms, kStrayNorm, kPageTokenCount) == nullptr) {
    std::fill_n(mask.of_slot, kPageTokenCount, 1.0f);
    return true;
  }
  for (int i = 0; i < kPageTokenCount; ++i) {
    const bool scored = first + i >= keys_.begin && first + i < keys_.end;
    mask.of_slot[i] = scored && norms[i] != kStrayNorm ? 1.0f : 0.0f;
  }
  return false;
}

absl::Status AsymmetricScorer::Bins(int64_t page, int tile_begin, int tile_end, uint16_t* bins,
                                    uint16_t* const* head_bins) const {
  // The kernel prefetches the codes and factors of the next page. This prefetches its norms and its
  // centre.
  const std::byte* const next = PageOf(page + 1);
  const int64_t behind = query_.layout.norm_offset_bytes();
  if (next != nullptr) PrefetchRow(next + behind, query_.layout.page_bytes() - behind);
  PageMask mask;
  const bool all = MaskPage(page, mask);
  LevelTarget levels;
  if (levels_ != nullptr) {
    const int64_t page_levels = int64_t{query_.row_count} * kPageTokenCount;
    levels = {levels_ + (page - first_page_) * page_levels, shrinkage_.data()};
  }
  AsymmetricBins(query_, {PageOf(page), next}, PageCentreLogits(page), mask, tile_begin, tile_end,
                 bins, head_bins, levels,
                 page_sums_.data() + (page - first_page_) * query_.row_count);
  if (levels.levels != nullptr && !all) {
    for (int i = 0; i < query_.row_count * kPageTokenCount; ++i) {
      if (mask.of_slot[i % kPageTokenCount] == 0) levels.levels[i] = 0;
    }
  }
  return absl::OkStatus();
}

RankSums<double> AsymmetricScorer::SumPages(int g) const {
  std::array<double, kRankPageChains> weight{}, error{};
  for (int64_t p = 0; p < page_count_; ++p) {
    const RankSums<float>& sums = page_sums_[p * query_.row_count + g];
    weight[(first_page_ + p) % kRankPageChains] += double{sums.weight};
    error[(first_page_ + p) % kRankPageChains] += double{sums.error};
  }
  return {SumChains(weight.data(), kRankPageChains), SumChains(error.data(), kRankPageChains)};
}

LevelTerms AsymmetricScorer::KeepLevels(uint8_t* levels) {
  levels_ = levels;
  for (const double scale : error_scale_) shrinkage_.push_back(LevelShrinkage(scale));
  return {query_.references.reference, shrinkage_.data()};
}

bool AsymmetricScorer::Reweigh() {
  // A second call: the weights have changed, but not the e, and so not the sums.
  if (!sums_.empty()) return false;
  HeadShares shares{};
  for (int g = 0; g < query_.row_count; ++g) {
    sums_.push_back(SumPages(g));
    shares.Add(query_.references.head_weight[g], sums_[g].weight);
  }
  if (!shares.AreFarApart()) return false;
  for (int g = 0; g < query_.row_count; ++g) {
    query_.references.head_weight[g] = shares.WeightOf(sums_[g].weight);
  }
  return true;
}

bool AsymmetricScorer::HasMass(int64_t page) const {
  const int heads = query_.row_count;
  const auto page_count = static_cast<int64_t>(page_sums_.size()) / heads;
  for (int g = 0; g < heads; ++g) {
    const float sum = page_sums_[(page - first_page_) * heads + g].weight;
    if (PageHasMass(sum, sums_[g].weight, page_count)) return true;
  }
  return false;
}

void AsymmetricScorer::RankVariances(std::span<double> of_head) const {
  for (int g = 0; g < query_.row_count; ++g) {
    of_head[g] = RankVariance(error_scale_[g], sums_[g]);
  }
}

}  // namespace spillway
