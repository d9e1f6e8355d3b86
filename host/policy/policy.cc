#include "host/policy/policy.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <string>
#include <string_view>

#include "absl/strings/str_cat.h"
#include "host/base/limits.h"
#include "host/core/budget.h"
#include "host/core/normal.h"
#include "host/core/page_index.h"
#include "host/core/rank_error.h"
#include "host/model/field_checks.h"
#include "host/policy/methods.h"

namespace spillway {
namespace {

constexpr int64_t kEdgeTokenCountMax = int64_t{1} << 20;
constexpr int64_t kDenseTokenCountMin = 1024;
constexpr int64_t kDenseTokenCountMax = int64_t{1} << 40;
constexpr int64_t kHeavyCountMax = std::numeric_limits<int32_t>::max();
// Heavy tokens with kAdaptive if the error of the ranks is not known.
constexpr int64_t kUnknownErrorHeavyCount = 256;
constexpr int kPilotMin = 16;
constexpr int kPilotMax = 65536;
constexpr double kInflationMax = 16;
constexpr double kDeltaMax = 0.2;
constexpr double kDeltaMaxDenominator = 0.5;

void CheckDenseLayers(const Policy& policy, const ModelSpec& spec, FieldChecks& checks) {
  std::vector<int32_t> layers = policy.dense_layers;
  std::sort(layers.begin(), layers.end());
  for (size_t i = 0; i < layers.size(); ++i) {
    if (layers[i] < 0 || layers[i] >= spec.layer_count) {
      checks.Add("dense_layers.layers",
                 absl::StrCat("layer ", layers[i], " is not in [0, ", spec.layer_count, ")"));
      return;
    }
    if (i > 0 && layers[i] == layers[i - 1]) {
      checks.Add("dense_layers.layers", absl::StrCat("layer ", layers[i], " is repeated"));
      return;
    }
  }
}

template <typename Value>
void CheckMethod(std::string_view field, Value value, const ModelSpec& spec, FieldChecks& checks) {
  const auto* method = FindMethod(value);
  if (method == nullptr) {
    checks.Add(field,
               absl::StrCat("value ", static_cast<int>(value), ": ", std::string(kNoSuchMethod)));
  } else if (!method->is_served(spec)) {
    checks.Add(field, absl::StrCat(ApiName(value), " needs ", std::string(method->needs)));
  }
}

void CheckSelector(std::string_view field, Selector selector, const ModelSpec& spec,
                   FieldChecks& checks) {
  CheckMethod(field, selector, spec, checks);
}

// Refuses `field`, which needs logits, if the selector estimates none.
void CheckLogits(std::string_view field, Selector selector, FieldChecks& checks) {
  const SelectorMethod* method = FindMethod(selector);
  if (method == nullptr || method->estimates_logits()) return;
  checks.Add(field, absl::StrCat("needs a selector that estimates logits; ", ApiName(selector),
                                 " counts bits"));
}

void CheckCandidates(const Policy& policy, const ModelSpec& spec, FieldChecks& checks) {
  if (!policy.candidate_selector.has_value()) return;
  if (!HasFirstSelection()) {
    checks.Add("candidates", std::string(kNoSuchMethod));
    return;
  }
  if (*policy.candidate_selector == Selector::kAll) {
    checks.Add("candidates.selector", "SELECTOR_ALL selects nothing; leave candidates unset");
  } else {
    CheckSelector("candidates.selector", *policy.candidate_selector, spec, checks);
  }
  CheckLogits("candidates", policy.selector, checks);
  checks.InRange("candidates.count", policy.candidate_count, 0, kHeavyCountMax);
  checks.Positive("candidates.fraction", policy.candidate_fraction, 1, true);
}

void CheckHeavy(const Policy& policy, FieldChecks& checks) {
  switch (policy.heavy_kind) {
    case HeavyKind::kAdaptive:
      return;
    case HeavyKind::kCount:
      checks.InRange("top_k.count", policy.heavy_count, 0, kHeavyCountMax);
      return;
    case HeavyKind::kFraction:
      checks.Positive("top_k.fraction", policy.heavy_fraction, 1, true);
      return;
    case HeavyKind::kMass:
      CheckLogits("top_p", policy.selector, checks);
      checks.Positive("top_p.mass", policy.heavy_mass, 1, true);
      checks.InRange("top_p.floor_token_count", policy.heavy_floor, 1, kHeavyCountMax);
      checks.InRange("top_p.ceiling_token_count", policy.heavy_ceiling,
                     std::max<int64_t>(policy.heavy_floor, 1), kHeavyCountMax);
      return;
  }
  checks.Add("top_k", absl::StrCat("kind ", static_cast<int>(policy.heavy_kind), " is unknown"));
}

bool ReadsPageIndex(Selector selector) {
  const SelectorMethod* method = FindMethod(selector);
  return method != nullptr && method->reads_page_index;
}

// Whether the selector ranks by exact logits, or by estimates whose error is known.
bool IsExactOrEstimated(Selector selector) {
  return selector == Selector::kAsymmetric || selector == Selector::kOracle;
}

// Maximum size of the window: the policy's, or an open page.
int64_t WindowMax(const Policy& policy, const ModelSpec& spec) {
  const int64_t window = std::clamp<int64_t>(policy.window_token_count, 1, kEdgeTokenCountMax);
  const int64_t n = int64_t{1} << 40;  // a multiple of kPageTokenCount
  return std::max(window, n - 1 - policy.ScoredEnd(spec, n - 1));
}

// The fewest heavy tokens that the policy may ask for, for one KV head.
int64_t HeavyCountMin(const Policy& policy) {
  switch (policy.heavy_kind) {
    case HeavyKind::kAdaptive:
      return policy.KnowsRankError() ? kAdaptiveHeavyMin : kUnknownErrorHeavyCount;
    case HeavyKind::kCount:
      return policy.heavy_count;
    case HeavyKind::kFraction:
      return 1;
    case HeavyKind::kMass:
      return policy.heavy_floor;
  }
  return 1;
}

void CheckTail(const Policy& policy, const ModelSpec& spec, FieldChecks& checks) {
  CheckMethod("tail", policy.tail, spec, checks);
  const TailMethod* tail = FindMethod(policy.tail);
  if (tail != nullptr && !tail->limited && policy.row_count_max != 0) {
    checks.Add("row_count_max",
               absl::StrCat(ApiName(policy.tail), " supports no limit: leave it 0"));
  }
  if (policy.bound > Bound::kRatio) {
    checks.Add("bound", absl::StrCat("value ", static_cast<int>(policy.bound), " is unknown"));
  }
  checks.Positive("epsilon", policy.epsilon, 1, false);
  const bool denominator = policy.tail == Tail::kUniform && policy.bound == Bound::kDenominator;
  checks.Positive("delta", policy.delta, denominator ? kDeltaMaxDenominator : kDeltaMax, true);
  checks.InRange("pilot_token_count", policy.pilot_token_count, kPilotMin, kPilotMax);
  if (!(policy.inflation >= 1 && policy.inflation <= kInflationMax)) {
    checks.Add("inflation",
               absl::StrCat("value ", policy.inflation, " is not in [1, ", kInflationMax, "]"));
  }
}

void CheckRowCountMax(const Policy& policy, const ModelSpec& spec, FieldChecks& checks) {
  if (policy.row_count_max == 0) return;
  // The values are clamped to their ranges, so that the sum cannot overflow. Validate() reports
  // values out of range.
  const int64_t least = std::clamp<int64_t>(policy.sink_token_count, 0, kEdgeTokenCountMax) +
                        WindowMax(policy, spec) +
                        std::clamp<int64_t>(HeavyCountMin(policy), 1, kHeavyCountMax) + kPilotMin;
  if (policy.row_count_max < least) {
    checks.Add("row_count_max",
               absl::StrCat("value ", policy.row_count_max, " is neither 0 nor at least ", least,
                            " (sink + window or open page + heavy count + ", kPilotMin, ")"));
  }
}

}  // namespace

int64_t Policy::CandidateCount(int64_t n) const {
  return candidate_count > 0
             ? candidate_count
             : static_cast<int64_t>(std::ceil(candidate_fraction * static_cast<double>(n)));
}

bool Policy::IsDenseLayer(int layer) const {
  return std::find(dense_layers.begin(), dense_layers.end(), layer) != dense_layers.end();
}

int64_t Policy::HeavyCount(int64_t n) const {
  if (heavy_kind == HeavyKind::kAdaptive) return HeavyCountMin(*this);
  return heavy_kind == HeavyKind::kCount
             ? heavy_count
             : static_cast<int64_t>(std::ceil(heavy_fraction * static_cast<double>(n)));
}

bool Policy::KnowsRankError() const {
  return !candidate_selector.has_value() && IsExactOrEstimated(selector);
}

bool Policy::AnswersFromCodes(const ModelSpec& spec, Tail tail) const {
  return spec.value_bits() > 0 && selector == Selector::kAsymmetric &&
         !candidate_selector.has_value() && tail == Tail::kStratified;
}

int64_t Policy::ScoredEnd(const ModelSpec& spec, int64_t n) const {
  const int64_t end = n - window_token_count;
  const bool by_pages = spec.hash.kind == HashKind::kRotation &&
                        (ReadsPageIndex(selector) ||
                         (candidate_selector.has_value() && ReadsPageIndex(*candidate_selector)));
  return by_pages ? std::min(end, ClosedPages(n) * kPageTokenCount) : end;
}

bool Policy::IsDense(const ModelSpec& spec, int layer, int64_t query_count, int64_t n) const {
  if (selector == Selector::kAll || n <= dense_token_count || IsDenseLayer(layer) ||
      query_count > kSparseQueryCountMax) {
    return true;
  }
  const int64_t scored = ScoredEnd(spec, n) - sink_token_count;
  return scored <= (heavy_kind == HeavyKind::kMass ? heavy_floor : HeavyCount(n));
}

bool WeighsValues(Selector selector, const ModelSpec& spec) {
  return spec.hash.kind == HashKind::kRotation && IsExactOrEstimated(selector);
}

bool RanksCarryGuarantee(const Policy& policy, const TailPolicy& tail, const ModelSpec& spec,
                         int64_t n) {
  if (tail.tail == Tail::kUniform && tail.bound == Bound::kPaper) return true;
  // Tokens that a first selection misses have no rank.
  if (policy.candidate_selector.has_value()) return false;
  const int64_t longest = MethodOf(policy.selector).guaranteed_token_count(spec);
  return longest > 0 && n <= longest;
}

TailTerms TermsOf(const Policy& policy, const TailPolicy& tail, bool may_promise) {
  return {.tail = tail.tail,
          .bound = tail.bound,
          .may_promise = may_promise,
          .pilot_count = tail.pilot_token_count,
          .epsilon = policy.epsilon,
          .z = NormalQuantile(1 - policy.delta / 2),
          .one_sided_z = NormalQuantile(1 - policy.delta),
          .bound_z = BoundQuantile(tail.bound, policy.delta),
          .inflation = tail.inflation,
          .row_count_max = policy.row_count_max};
}

Policy DefaultPolicy(const ModelSpec& spec) {
  const SelectorMethod* first = &MethodOf(Selector::kAll);
  for (const SelectorMethod* method : SelectorMethods()) {
    if (method->default_order == 0 || !method->is_served(spec)) continue;
    if (method->default_order < first->default_order) first = method;
  }
  Policy policy;
  policy.selector = first->selector;
  return policy;
}

std::vector<FieldError> Validate(const Policy& policy, const ModelSpec& spec) {
  FieldChecks checks;
  checks.InRange("sink_token_count", policy.sink_token_count, 0, kEdgeTokenCountMax);
  checks.InRange("window_token_count", policy.window_token_count, 1, kEdgeTokenCountMax);
  checks.InRange("dense_token_count", policy.dense_token_count, kDenseTokenCountMin,
                 kDenseTokenCountMax);
  CheckDenseLayers(policy, spec, checks);
  CheckSelector("selector", policy.selector, spec, checks);
  CheckHeavy(policy, checks);
  CheckCandidates(policy, spec, checks);
  CheckTail(policy, spec, checks);
  CheckRowCountMax(policy, spec, checks);
  return checks.Take();
}

}  // namespace spillway
