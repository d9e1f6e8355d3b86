#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include "host/core/selector.h"
#include "host/core/tail.h"
#include "host/model/model_spec.h"

namespace spillway {

// kAdaptive: as many as the ranks' own error asks for (host/core/rank_error.h).
enum class HeavyKind : uint8_t { kCount, kFraction, kMass, kAdaptive };

// How the tail of one KV head is sampled: what may differ between the heads of
// an attend.
struct TailPolicy {
  Tail tail = Tail::kStratified;
  Bound bound = Bound::kRatio;  // kUniform only
  int32_t pilot_token_count = 24;
  double inflation = 1.25;
};

// How one attend chooses its rows and how sure it must be, every field
// resolved. Ranges and meanings stand in proto/spillway/v1/policy.proto.
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
  // A first selection, whose finds alone the selector looks at.
  std::optional<Selector> candidate_selector;
  int64_t candidate_count = 0;       // 0: by fraction
  double candidate_fraction = 0.25;  // (0, 1]
  double epsilon = 0.1;
  double delta = 0.1;
  uint64_t seed = 0;
  int64_t row_count_max = 0;  // 0: no limit

  bool IsDenseLayer(int layer) const;
  // Tokens that are called heavy by count or fraction among n visible; kAdaptive:
  // at least.
  int64_t HeavyCount(int64_t n) const;
  // Whether the ranks' error is known, and sets a kAdaptive count: of
  // SELECTOR_ASYMMETRIC and, as 0, of SELECTOR_ORACLE.
  bool KnowsRankError() const;
  // Where the scored tokens [sink, end) of n visible ones end: before the window
  // and, where ranks come from the page index, before the page that is open.
  int64_t ScoredEnd(const ModelSpec& spec, int64_t n) const;
  // Tokens that the first selection finds among n visible.
  int64_t CandidateCount(int64_t n) const;
  // Whether queries of a layer with n visible tokens are attended densely:
  // by the policy's word, or because nothing is left for a tail.
  bool IsDense(const ModelSpec& spec, int layer, int64_t query_count, int64_t n) const;
};

// Whether a selector's ranks weigh values and set strays apart
// (host/core/page_index.h).
bool WeighsValues(Selector selector, const ModelSpec& spec);

// Whether a selector's ranks over n visible tokens are good enough for a tail
// that rests on them: as far as promises were found to be kept, and to twice
// that length, or at any length where the ranks know their own error; never
// behind a first selection (docs/adr/0018, 0025). vAttention's `paper` bound
// rests on no ranks.
bool RanksCarryGuarantee(const Policy& policy, const TailPolicy& tail, const ModelSpec& spec,
                         int64_t n);

// What a policy asks of a KV head's tail. may_promise: if the estimate is
// within epsilon.
TailTerms TermsOf(const Policy& policy, const TailPolicy& tail, bool may_promise);

// The default policy of a model: the values above with the best selector that
// the model serves (SelectorMethod::default_order).
Policy DefaultPolicy(const ModelSpec& spec);

// What is impossible about the policy on this model, empty when valid. Field
// names are the proto's, without a prefix ("epsilon", "top_p.mass").
std::vector<FieldError> Validate(const Policy& policy, const ModelSpec& spec);

}  // namespace spillway
