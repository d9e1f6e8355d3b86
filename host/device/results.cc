#include "host/device/results.h"

#include <algorithm>
#include <cmath>
#include <numeric>
#include <optional>
#include <span>

#include "host/base/finite.h"
#include "host/core/estimate.h"
#include "host/device/errors.h"

namespace spillway {
namespace {

void SelectEverything(const AttendQuery& attend, int64_t query, int groups, AttendResult& result) {
  const int64_t n = attend.visible[query];
  const int64_t sink = std::min(attend.policy.sink_token_count, n);
  const int64_t window = std::max(sink, n - attend.policy.window_token_count);
  for (int i = 0; i < groups; ++i) {
    Selection& s = result.selections[query * groups + i];
    s.indices.resize(n);
    std::iota(s.indices.begin(), s.indices.end(), 0u);
    s.log_weights.assign(n, 0.0f);
    s.strata.assign(n, kStratumHeavy);
    std::fill(s.strata.begin(), s.strata.begin() + sink, kStratumSink);
    std::fill(s.strata.begin() + window, s.strata.end(), kStratumWindow);
  }
}

}  // namespace

void SelectionBuilder::AddSampled(std::span<const uint32_t> tokens, int h, int64_t drawn,
                                  int64_t token_count) {
  const auto log_weight =
      static_cast<float>(std::log(StratumRate(std::max<int64_t>(1, drawn), token_count)));
  for (const uint32_t token : tokens) {
    rows_.push_back({token, log_weight, static_cast<uint8_t>(kStratumTail + h)});
  }
}

Selection SelectionBuilder::Build() {
  std::sort(rows_.begin(), rows_.end(),
            [](const Row& a, const Row& b) { return a.token < b.token; });
  Selection selection;
  for (const Row& row : rows_) {
    selection.indices.push_back(row.token);
    selection.log_weights.push_back(row.log_weight);
    selection.strata.push_back(row.stratum);
  }
  return selection;
}

AttendResult AllocateResult(const ModelSpec& spec, const AttendQuery& attend) {
  AttendResult result;
  const int64_t heads = attend.query_count * spec.query_head_count;
  if (!attend.select_only) {
    result.out.resize(heads * spec.head_dim);
    result.lse.resize(heads);
  }
  result.certificates.resize(heads);
  const int64_t groups = attend.query_count * spec.group_count();
  result.touched_row_counts.resize(groups);
  if (attend.select_only) result.selections.resize(groups);
  return result;
}

absl::Status CheckOutput(const ModelSpec& spec, int layer, const AttendResult& result) {
  const std::optional<int64_t> at =
      FindNonFinite(std::as_bytes(std::span(result.out)), DType::kF32);
  if (!at.has_value()) return absl::OkStatus();
  const int64_t head = *at / spec.head_dim;
  return NonFiniteOutputError(head / spec.query_head_count, head % spec.query_head_count, layer);
}

void FillDenseResult(const ModelSpec& spec, const AttendQuery& attend, int64_t begin, int64_t end,
                     AttendResult& result) {
  for (int64_t t = begin; t < end; ++t) {
    for (int h = 0; h < spec.query_head_count; ++h) {
      result.certificates[t * spec.query_head_count + h] = {.visible_token_count =
                                                                attend.visible[t]};
    }
    const int groups = spec.group_count();
    std::fill_n(result.touched_row_counts.begin() + t * groups, groups, attend.visible[t]);
    if (attend.select_only) SelectEverything(attend, t, groups, result);
  }
}

}  // namespace spillway
