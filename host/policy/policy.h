#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include "host/core/selector.h"
#include "host/core/tail.h"
#include "host/model/model_spec.h"

namespace spillway {

// kAdaptive: the count follows from the error of the ranks (host/core/rank_error.h).
enum class HeavyKind : uint8_t { kCount, kFraction, kMass, kAdaptive };

// How the tail of one KV head is sampled. The audit may raise these values for single heads of an
// attend.
struct TailPolicy {
  Tail tail = Tail::kStratified;
  Bound bound = Bound::kRatio;  // kUniform only
  int32_t pilot_token_count = 24;
  double inflation = 1.25;
};

// How one attend chooses its rows, and its error bound, with all defaults resolved.
// proto/spillway/v1/policy.proto has meanings and ranges.
struct Policy : TailPolicy {
  int64_t sink_token_count = 64;
  int64_t window_token_count = 64;
  int64_t dense_token_count = 2048;
  std::vector<int32_t> dense_layers;
  Selector selector = Selector::kAsymmetric;
  HeavyKind heavy_kind = HeavyKind::kAdaptive;
  int64_t heavy_count = 256;     // kCount
  double heavy_fraction = 0;     // kFraction, (0, 1]
  double heavy_mass = 0.95;      // kMass, (0, 1]
  int64_t heavy_floor = 64;      // kMass
  int64_t heavy_ceiling = 4096;  // kMass
  // The first selection: the selector ranks only the tokens that this one finds.
  std::optional<Selector> candidate_selector;
  int64_t candidate_count = 0;       // 0: by fraction
  double candidate_fraction = 0.25;  // (0, 1]
  double epsilon = 0.1;
  double delta = 0.1;
  uint64_t seed = 0;
  int64_t row_count_max = 0;  // 0: no limit

  bool IsDenseLayer(int layer) const;
  // Number of heavy tokens by count or fraction, if n tokens are visible. kAdaptive: the minimum.
  // Not for kMass.
  int64_t HeavyCount(int64_t n) const;
  // Whether the error of the ranks is known; it then sets a kAdaptive count. True for
  // SELECTOR_ASYMMETRIC, and for SELECTOR_ORACLE, whose error is 0. False with a first selection.
  bool KnowsRankError() const;
  // Whether codes answer for the tail, which the sampled rows correct: if the model has codes of
  // its values, the selector estimates the logits of all tokens, and the tail is stratified. tail:
  // that of the KV head.
  bool AnswersFromCodes(const ModelSpec& spec, Tail tail) const;
  // End of the scored tokens [sink, end), if n tokens are visible: where the window begins or, if
  // ranks come from the page index, at the latest where the open page begins.
  int64_t ScoredEnd(const ModelSpec& spec, int64_t n) const;
  // Number of tokens that the first selection finds, if n tokens are visible.
  int64_t CandidateCount(int64_t n) const;
  // Whether queries of a layer with n visible tokens are attended densely: because the policy says
  // so, or because no token would remain for the tail.
  bool IsDense(const ModelSpec& spec, int layer, int64_t query_count, int64_t n) const;
};

// Whether ranks of this selector include the distances of values and treat strays separately
// (host/core/page_index.h).
bool WeighsValues(Selector selector, const ModelSpec& spec);

// Whether a selector's ranks over n visible tokens are good enough for an error bound that relies
// on them (docs/adr/0018, 0025). This holds up to SelectorMethod::guaranteed_token_count, but never
// after a first selection. vAttention's `paper` bound does not depend on ranks.
bool RanksCarryGuarantee(const Policy& policy, const TailPolicy& tail, const ModelSpec& spec,
                         int64_t n);

// The policy's terms for a KV head's tail. may_promise: whether an estimate within epsilon gives an
// error bound.
TailTerms TermsOf(const Policy& policy, const TailPolicy& tail, bool may_promise);

// The default policy of a model: the default values above, with the first selector by
// SelectorMethod::default_order that supports the model.
Policy DefaultPolicy(const ModelSpec& spec);

// Returns the fields of the policy that are invalid for this model; empty if it is valid. Field
// names are those of the proto, without a prefix ("epsilon", "top_p.mass").
std::vector<FieldError> Validate(const Policy& policy, const ModelSpec& spec);

}  // namespace spillway
