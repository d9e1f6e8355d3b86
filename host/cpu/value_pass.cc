#include "host/cpu/value_pass.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <memory>

#include "host/base/elements.h"
#include "host/base/parallel.h"
#include "host/base/status_macros.h"
#include "host/core/rank_error.h"
#include "host/core/reference_pages.h"
#include "host/core/value_code.h"

namespace spillway {

namespace {

// Value factors and centres are a page apart, so the hardware does not prefetch them: as many pages
// ahead are prefetched.
constexpr int64_t kAhead = 4;

float FromBf16(const std::byte* at) {
  uint16_t bits;
  std::memcpy(&bits, at, 2);
  return std::bit_cast<float>(uint32_t{bits} << 16);
}

}  // namespace

ValuePass::ValuePass(const ScoredKeys& keys, const KeyScorer& scorer, const ScorePass& scores,
                     float value_unit)
    : keys_(keys),
      scorer_(scorer),
      scores_(scores),
      layout_(keys.model().layout()),
      signs_(keys.model().signs()),
      group_(keys.spec().group()),
      dim_(keys.spec().head_dim),
      page_count_(scores.page_count()),
      inverse_unit_(1 / value_unit),
      values_(static_cast<size_t>(group_) * dim_),
      centres_(values_.size()) {}

void ValuePass::WeighPages(int64_t begin, int64_t end) {
  for (int64_t page = begin; page < end; ++page) {
    PrefetchRow(FactorsOf(std::min(page + kAhead, end - 1)), 2 * kPageTokenCount);
    const bool has_mass = scorer_.HasMass(scores_.first_page() + page);
    have_mass_[page] = has_mass ? 1 : 0;
    for (int g = 0; g < group_; ++g) {
      PageWeights& weights = pages_[page * group_ + g];
      weights = WeighPage(LevelsOf(page, g), FactorsOf(page));
      if (!has_mass) weights.largest = 0;
    }
  }
}

void ValuePass::SumWeights() {
  for (int g = 0; g < group_; ++g) {
    std::array<double, kRankPageChains> chains{};
    for (int64_t page = 0; page < page_count_; ++page) {
      chains[(scores_.first_page() + page) % kRankPageChains] +=
          double{pages_[page * group_ + g].sum};
    }
    sums_[g] = SumChains(chains.data(), kRankPageChains);
  }
}

void ValuePass::SumPages(int64_t begin, int64_t end, TaskSums& sums) const {
  sums.centres.assign(values_.size(), 0.0f);
  sums.codes.assign(values_.size(), 0.0f);
  std::vector<int32_t> products(values_.size());
  std::vector<int8_t> weights(static_cast<size_t>(group_) * kPageTokenCount);
  for (int64_t page = begin; page < end; ++page) {
    const std::byte* const of_page = PageOf(page);
    PrefetchRow(PageOf(std::min(page + kAhead, end - 1)) + layout_.value_centre_offset_bytes(),
                2 * int64_t{dim_});
    const PageWeights* const by_head = pages_.data() + page * group_;
    float page_sums[kGroupMax];
    bool has_codes = false, has_mass = false;
    for (int g = 0; g < group_; ++g) {
      page_sums[g] = by_head[g].sum;
      has_codes |= by_head[g].largest > 0;
      has_mass |= by_head[g].sum > 0;
    }
    if (!has_mass) continue;
    const float square = AddCentre(of_page + layout_.value_centre_offset_bytes(), dim_,
                                   inverse_unit_, page_sums, group_, sums.centres.data());
    for (int g = 0; g < group_; ++g) {
      sums.centre_squares[g] += double{page_sums[g]} * double{square};
    }
    if (!has_codes) continue;
    int weight_sums[kGroupMax];
    for (int g = 0; g < group_; ++g) {
      weight_sums[g] = CodeWeights(LevelsOf(page, g), FactorsOf(page), by_head[g].largest,
                                   weights.data() + g * kPageTokenCount);
    }
    std::fill(products.begin(), products.end(), 0);
    SumValueCodes(layout_, of_page, weights.data(), group_, products.data());
    for (int g = 0; g < group_; ++g) {
      // t is u minus the middle of the levels: sum m t = (2 sum m u - (2^B - 1) sum m) / 2.
      const size_t at = static_cast<size_t>(g) * dim_;
      AddProducts(products.data() + at, dim_, ((1 << layout_.value_bits) - 1) * weight_sums[g],
                  0.5f * CodeWeightUnit(by_head[g].largest) * inverse_unit_,
                  sums.codes.data() + at);
    }
  }
}

absl::Status ValuePass::Reserve(int strata) {
  const int64_t of_page = group_ * int64_t{sizeof(PageWeights)} + int64_t{sizeof(std::byte*)} + 1;
  const int64_t of_task = int64_t{2} * group_ * dim_ * int64_t{sizeof(float)} +
                          int64_t{strata} * group_ * int64_t{sizeof(PredictedSums)};
  ASSIGN_OR_RETURN(reservation_, keys_.context->workspaces->Reserve(page_count_ * of_page +
                                                                    task_count() * of_task));
  pages_.resize(page_count_ * group_);
  have_mass_.resize(page_count_);
  for (int64_t page = 0; page < page_count_; ++page) {
    codes_.push_back(keys_.IndexPage(scores_.first_page() + page));
  }
  return absl::OkStatus();
}

absl::Status ValuePass::Sum(const Strata& strata) {
  RETURN_IF_ERROR(Reserve(strata.size()));
  RETURN_IF_ERROR(SumValues());
  return Predict(strata);
}

absl::Status ValuePass::SumValues() {
  const auto for_tasks = [&](const auto& f) {
    ParallelFor(int64_t{0}, task_count(), [&](int64_t task) {
      if (!keys_.context->CheckCancelled().ok()) return;
      f(task, task * kTaskPages, std::min(page_count_, (task + 1) * kTaskPages));
    });
    return keys_.context->CheckCancelled();
  };
  RETURN_IF_ERROR(for_tasks([&](int64_t, int64_t begin, int64_t end) { WeighPages(begin, end); }));
  SumWeights();
  std::vector<TaskSums> sums(task_count());
  RETURN_IF_ERROR(for_tasks(
      [&](int64_t task, int64_t begin, int64_t end) { SumPages(begin, end, sums[task]); }));
  std::vector<double> codes(values_.size());
  for (const TaskSums& of_task : sums) {
    for (size_t i = 0; i < values_.size(); ++i) {
      centres_[i] += double{of_task.centres[i]};
      codes[i] += double{of_task.codes[i]};
    }
    for (int g = 0; g < group_; ++g) centre_squares_[g] += of_task.centre_squares[g];
  }
  values_ = centres_;
  for (int g = 0; g < group_; ++g) {
    const size_t first = static_cast<size_t>(g) * dim_;
    float of_head[kHeadDimMax];
    for (int i = 0; i < dim_; ++i) of_head[i] = static_cast<float>(codes[first + i]);
    UndoHadamard(signs_, dim_, of_head);
    for (int i = 0; i < dim_; ++i) values_[first + i] += double{of_head[i]};
  }
  return absl::OkStatus();
}

CodeSums ValuePass::SumsOf(int head) const {
  CodeSums sums;
  sums.reference = double{LevelLogit(kLevelZero, scores_.level_terms().references[head])};
  sums.sum = sums_[head];
  const double* const first = values_.data() + static_cast<size_t>(head) * dim_;
  sums.value.assign(first, first + dim_);
  const double* const centres = centres_.data() + static_cast<size_t>(head) * dim_;
  sums.centre.assign(centres, centres + dim_);
  sums.centre_square = centre_squares_[head];
  for (size_t i = head; i < predicted_.size(); i += group_) sums.predicted.push_back(predicted_[i]);
  return sums;
}

ResidualRows ValuePass::RowsOf(std::span<const uint32_t> tokens, Block& block) const {
  for (size_t r = 0; r < tokens.size(); ++r) {
    const int64_t page = tokens[r] / kPageTokenCount - scores_.first_page();
    const auto slot = static_cast<int>(tokens[r] % kPageTokenCount);
    const std::byte* const of_page = PageOf(page);
    float* const centre = block.centres.data() + r * dim_;
    ToFloat(DType::kBF16, of_page + layout_.value_centre_offset_bytes(), dim_, centre);
    for (int i = 0; i < dim_; ++i) centre[i] *= inverse_unit_;
    const float factor = FromBf16(FactorsOf(page) + 2 * slot);
    for (int g = 0; g < group_; ++g) {
      const uint8_t level = LevelsOf(page, g)[slot];
      const float largest = pages_[page * group_ + g].largest;
      const int weight = CodeWeight(LevelWeight(level) * factor, CodeWeightInverse(largest));
      block.levels[g * kRowBlock + r] = level;
      block.code_weights[g * kRowBlock + r] =
          static_cast<float>(weight) * CodeWeightUnit(largest) * inverse_unit_;
    }
    DecodeValue(layout_, signs_, of_page, slot, block.codes.data() + r * kHeadDimMax);
  }
  return {block.levels, block.code_weights, scores_.level_terms().references, block.centres.data(),
          block.codes.data()};
}

void ValuePass::AddPrediction(int64_t page, int slot, PredictedSums* sums) const {
  const float key_factor = FromBf16(PageOf(page) + layout_.factor_offset_bytes() + 2 * slot);
  const float value_factor = FromBf16(FactorsOf(page) + 2 * slot);
  const float factor_square = std::min(key_factor * key_factor, kFactorSquareMax);
  const float in_units = value_factor * inverse_unit_;
  const float value_square =
      in_units * in_units * (static_cast<float>(dim_) * SquareOfFactor(layout_.value_bits));
  const auto distortion =
      have_mass_[page] != 0 ? static_cast<float>(QuantiserDistortion(layout_.value_bits)) : 1.0f;
  for (int g = 0; g < group_; ++g) {
    ++sums[g].count;
    const uint8_t level = LevelsOf(page, g)[slot];
    if (level == 0) continue;
    const float variance = LogitVariance(factor_square, scores_.level_terms().shrinkage[g]);
    const PredictedTerms terms =
        PredictTerms(LevelWeight(level), variance, value_square, distortion);
    sums[g].of_value += double{terms.of_value};
    sums[g].of_centre += double{terms.of_centre};
  }
}

absl::Status ValuePass::Predict(const Strata& strata) {
  const int64_t begin = keys_.begin, end = keys_.end;
  // The bin from which on all tokens count: that of the last of the first, small strata.
  int near = 0;
  while (near < strata.size() && strata.counts[near] <= kNearStratumTokens) ++near;
  const uint16_t edge = near > 0 ? strata.lowest_bin[near - 1] : kNoBin;
  const ReferencePages reference = ReferencePages::Of(begin, end);
  const int64_t tasks = scores_.block_count();
  const size_t width = static_cast<size_t>(strata.size()) * group_;
  std::vector<std::vector<PredictedSums>> sums(tasks, std::vector<PredictedSums>(width));
  ParallelFor(int64_t{0}, tasks, [&](int64_t task) {
    const int64_t from = scores_.block_begin(task), to = scores_.block_end(task);
    const auto add = [&](int64_t token, uint16_t bin) {
      AddPrediction(token / kPageTokenCount - scores_.first_page(),
                    static_cast<int>(token % kPageTokenCount),
                    sums[task].data() + static_cast<size_t>(strata.of_bin[bin]) * group_);
    };
    const auto positions = std::make_unique_for_overwrite<uint32_t[]>(to - from);
    const int64_t count = FilterBins(scores_.bins(from), to - from, edge, positions.get());
    for (int64_t i = 0; i < count; ++i) {
      const uint16_t bin = *scores_.bins(from + positions[i]);
      if (bin < kNoBin) add(from + positions[i], bin);
    }
    // The reference pages of this block.
    const int64_t skipped = from / kPageTokenCount - reference.first;
    for (int64_t i = skipped > 0 ? (skipped + reference.step - 1) / reference.step : 0;
         i < reference.count && reference.page(i) * kPageTokenCount < to; ++i) {
      const int64_t first = reference.page(i) * kPageTokenCount;
      for (int64_t t = std::max(first, from); t < std::min(first + kPageTokenCount, to); ++t) {
        const uint16_t bin = *scores_.bins(t);
        if (bin < edge && bin < kNoBin) add(t, bin);
      }
    }
  });
  predicted_.assign(width, {});
  for (const std::vector<PredictedSums>& of_task : sums) {
    for (size_t i = 0; i < width; ++i) {
      predicted_[i].of_value += of_task[i].of_value;
      predicted_[i].of_centre += of_task[i].of_centre;
      predicted_[i].count += of_task[i].count;
    }
  }
  return keys_.context->CheckCancelled();
}

}  // namespace spillway
