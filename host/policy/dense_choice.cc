#include "host/policy/dense_choice.h"

#include <algorithm>

namespace spillway {
namespace {

// What a layer takes, measured on an H100 (docs/results/folds): dense attention over rows in GPU
// memory takes a little for its launches and reads at three quarters of the memory's rate. Choosing
// rows takes some 25 kernels, which wait for each other, a little for each group of each
// sequence, and reads codes at half of the rate.
constexpr double kDenseUs = 20;
constexpr double kDenseShareOfRate = 0.75;
constexpr double kSparseUs = 125;
constexpr double kSparseUsOfUnit = 1.2;
constexpr int kMeasuredMultiprocessors = 132;
constexpr double kCodesShareOfRate = 0.5;

}  // namespace

std::vector<bool> ChooseDense(const ModelSpec& spec, const GpuRates& rates, int64_t code_bytes,
                              int64_t query_count, std::span<const DenseCandidate> candidates) {
  std::vector<bool> none(candidates.size(), false), cheaper = none, all = none;
  if (rates.memory_bytes_per_us <= 0) return none;
  const auto groups = static_cast<double>(spec.group_count());
  const int64_t queries_of_pass = std::max<int64_t>(1, rates.query_rows_of_pass / spec.group());
  const auto passes = static_cast<double>((query_count + queries_of_pass - 1) / queries_of_pass);
  const double unit_us =
      kSparseUsOfUnit * kMeasuredMultiprocessors / std::max(1, rates.multiprocessor_count);
  double none_us = 0, cheaper_us = 0, all_us = 0;
  bool all_may = true, any_cheaper = false, all_cheaper = true;
  for (size_t i = 0; i < candidates.size(); ++i) {
    if (candidates[i].is_dense) continue;  // the same in all three
    const auto n = static_cast<double>(candidates[i].token_count);
    const double dense_us = passes * n * groups * static_cast<double>(spec.row_bytes()) /
                            (kDenseShareOfRate * rates.memory_bytes_per_us);
    const double sparse_us = static_cast<double>(query_count) * groups *
                             (unit_us + n * static_cast<double>(code_bytes) /
                                            (kCodesShareOfRate * rates.memory_bytes_per_us));
    cheaper[i] = candidates[i].may_be_dense && dense_us < sparse_us;
    all[i] = candidates[i].may_be_dense;
    all_may = all_may && all[i];
    any_cheaper = any_cheaper || cheaper[i];
    all_cheaper = all_cheaper && cheaper[i];
    none_us += sparse_us;
    cheaper_us += cheaper[i] ? dense_us : sparse_us;
    all_us += dense_us;
  }
  none_us += kSparseUs;
  cheaper_us += (any_cheaper ? kDenseUs : 0) + (all_cheaper ? 0 : kSparseUs);
  all_us += kDenseUs;
  if (all_may && all_us <= std::min(none_us, cheaper_us)) return all;
  return cheaper_us < none_us ? cheaper : none;
}

}  // namespace spillway
