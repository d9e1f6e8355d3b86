#include "services/convert/policy.h"

#include "absl/strings/str_cat.h"
#include "engine/errors.h"
#include "host/model/field_checks.h"
#include "host/policy/methods.h"

namespace spillway {
namespace {

// Sets `target` from an enum whose zero means "not set". name: the name of a value.
template <typename Proto, typename Host>
void ApplyEnum(Proto value, Proto last, const std::string& (*name)(Proto), const char* field,
               Host& target, std::vector<FieldError>& errors) {
  if (value == 0) return;
  if (value < 0 || value > last) {
    errors.push_back({field, absl::StrCat("value ", static_cast<int>(value), " is unknown")});
    return;
  }
  // The host's enums have the proto's order, without the zero.
  const auto host = static_cast<Host>(static_cast<int>(value) - 1);
  if constexpr (requires { FindMethod(host); }) {
    if (FindMethod(host) == nullptr) {
      errors.push_back({field, absl::StrCat(name(value), ": ", std::string(kNoSuchMethod))});
      return;
    }
  }
  target = host;
}

void ApplyHeavy(const v1::Policy& patch, Policy& policy) {
  if (patch.has_top_k()) {
    const v1::HeavyTopK& top_k = patch.top_k();
    if (top_k.has_fraction()) {
      policy.heavy_kind = HeavyKind::kFraction;
      policy.heavy_fraction = top_k.fraction();
    } else {
      policy.heavy_kind = HeavyKind::kCount;
      if (top_k.has_count()) policy.heavy_count = top_k.count();
    }
  } else if (patch.has_top_p()) {
    const v1::HeavyTopP& top_p = patch.top_p();
    policy.heavy_kind = HeavyKind::kMass;
    if (top_p.has_mass()) policy.heavy_mass = top_p.mass();
    if (top_p.has_floor_token_count()) policy.heavy_floor = top_p.floor_token_count();
    if (top_p.has_ceiling_token_count()) policy.heavy_ceiling = top_p.ceiling_token_count();
  } else if (patch.has_adaptive()) {
    policy.heavy_kind = HeavyKind::kAdaptive;
  }
}

void ApplyCandidates(const v1::Policy& patch, Policy& policy, std::vector<FieldError>& errors) {
  if (!patch.has_candidates()) return;
  const v1::Candidates& candidates = patch.candidates();
  policy.candidate_selector.reset();
  policy.candidate_count = 0;
  policy.candidate_fraction = Policy().candidate_fraction;
  if (candidates.selector() != v1::SELECTOR_UNSPECIFIED) {
    ApplyEnum(candidates.selector(), v1::Selector_MAX, v1::Selector_Name, "candidates.selector",
              policy.candidate_selector.emplace(), errors);
  }
  if (candidates.has_count()) {
    policy.candidate_count = candidates.count();
    // In a Policy, 0 means that the fraction counts, so a client must not send it.
    if (candidates.count() == 0) errors.push_back({"candidates.count", "value 0 is less than 1"});
  }
  if (candidates.has_fraction()) policy.candidate_fraction = candidates.fraction();
}

template <typename Host, typename Proto>
Proto EnumToProto(Host value) {
  return static_cast<Proto>(static_cast<int>(value) + 1);
}

// Selectors and tails have the API's values in the tables of methods; a test compares their names.
static_assert(static_cast<int>(Bound::kPaper) + 1 == v1::BOUND_PAPER);
static_assert(static_cast<int>(Bound::kRatio) + 1 == v1::BOUND_RATIO);

}  // namespace

absl::StatusOr<Policy> ApplyPolicy(const v1::Policy& patch, const Policy& base,
                                   const ModelSpec& spec, const std::string& prefix) {
  Policy policy = base;
  std::vector<FieldError> errors;
  if (patch.has_sink_token_count()) policy.sink_token_count = patch.sink_token_count();
  if (patch.has_window_token_count()) policy.window_token_count = patch.window_token_count();
  if (patch.has_dense_token_count()) policy.dense_token_count = patch.dense_token_count();
  if (patch.has_dense_layers()) {
    policy.dense_layers.assign(patch.dense_layers().layers().begin(),
                               patch.dense_layers().layers().end());
  }
  ApplyEnum(patch.selector(), v1::Selector_MAX, v1::Selector_Name, "selector", policy.selector,
            errors);
  ApplyHeavy(patch, policy);
  ApplyCandidates(patch, policy, errors);
  ApplyEnum(patch.tail(), v1::Tail_MAX, v1::Tail_Name, "tail", policy.tail, errors);
  ApplyEnum(patch.bound(), v1::Bound_MAX, v1::Bound_Name, "bound", policy.bound, errors);
  if (patch.has_epsilon()) policy.epsilon = patch.epsilon();
  if (patch.has_delta()) policy.delta = patch.delta();
  if (patch.has_pilot_token_count()) policy.pilot_token_count = patch.pilot_token_count();
  if (patch.has_inflation()) policy.inflation = patch.inflation();
  if (patch.has_seed()) policy.seed = patch.seed();
  if (patch.has_row_count_max()) policy.row_count_max = patch.row_count_max();
  if (patch.bound() != v1::BOUND_UNSPECIFIED && policy.tail != Tail::kUniform) {
    errors.push_back({"bound", "only with TAIL_UNIFORM"});
  }
  for (FieldError& error : Validate(policy, spec)) errors.push_back(std::move(error));
  if (errors.empty()) return policy;
  for (FieldError& error : errors) error.field.insert(0, prefix);
  return InvalidFields(errors);
}

v1::Policy ToProto(const Policy& policy) {
  v1::Policy out;
  out.set_sink_token_count(policy.sink_token_count);
  out.set_window_token_count(policy.window_token_count);
  out.set_dense_token_count(policy.dense_token_count);
  v1::LayerList& layers = *out.mutable_dense_layers();
  for (const int32_t layer : policy.dense_layers) layers.add_layers(layer);
  out.set_selector(EnumToProto<Selector, v1::Selector>(policy.selector));
  switch (policy.heavy_kind) {
    case HeavyKind::kAdaptive:
      out.mutable_adaptive();
      break;
    case HeavyKind::kCount:
      out.mutable_top_k()->set_count(policy.heavy_count);
      break;
    case HeavyKind::kFraction:
      out.mutable_top_k()->set_fraction(policy.heavy_fraction);
      break;
    case HeavyKind::kMass:
      out.mutable_top_p()->set_mass(policy.heavy_mass);
      out.mutable_top_p()->set_floor_token_count(policy.heavy_floor);
      out.mutable_top_p()->set_ceiling_token_count(policy.heavy_ceiling);
      break;
  }
  if (policy.candidate_selector.has_value()) {
    v1::Candidates& candidates = *out.mutable_candidates();
    candidates.set_selector(EnumToProto<Selector, v1::Selector>(*policy.candidate_selector));
    if (policy.candidate_count > 0) {
      candidates.set_count(policy.candidate_count);
    } else {
      candidates.set_fraction(policy.candidate_fraction);
    }
  }
  out.set_tail(EnumToProto<Tail, v1::Tail>(policy.tail));
  if (policy.tail == Tail::kUniform) {
    out.set_bound(EnumToProto<Bound, v1::Bound>(policy.bound));
  }
  out.set_epsilon(policy.epsilon);
  out.set_delta(policy.delta);
  out.set_pilot_token_count(policy.pilot_token_count);
  out.set_inflation(policy.inflation);
  out.set_seed(policy.seed);
  out.set_row_count_max(policy.row_count_max);
  return out;
}

}  // namespace spillway
