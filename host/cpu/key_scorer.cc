#include "host/cpu/key_scorer.h"

#include <cassert>
#include <utility>

#include "host/cpu/asymmetric_scorer.h"
#include "host/cpu/cpu_method.h"
#include "host/cpu/logit_scorer.h"

namespace spillway {

std::unique_ptr<KeyScorer> MakeScorer(Selector selector, const ScoredKeys& keys) {
  if (selector == Selector::kAsymmetric) return std::make_unique<AsymmetricScorer>(keys);
  if (selector == Selector::kOracle) return std::make_unique<ExactScorer>(keys);
  const CpuMethod* method = FindCpuMethod(selector);
  assert(method != nullptr);
  return method->make_scorer(keys);
}

std::unique_ptr<KeyScorer> MakeScorer(const ScoredKeys& keys) {
  const Policy& policy = keys.context->attend->policy;
  std::unique_ptr<KeyScorer> scorer = MakeScorer(policy.selector, keys);
  if (!policy.candidate_selector.has_value()) return scorer;
  const CpuMethod* method = FindFirstSelection();
  assert(method != nullptr);
  return method->make_first_selection(keys, std::move(scorer));
}

}  // namespace spillway
