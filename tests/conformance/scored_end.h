#pragma once

#include "host/policy/policy.h"
#include "tests/reference/page_index.h"

namespace spillway {

// Where the scored tokens of n visible ones end; the window follows. It reaches
// back over the open page where scores come from the codes of a rotation, or are
// an oracle's on such a model.
inline int64_t ScoredEnd(const ModelSpec& spec, const Policy& policy, int64_t n) {
  const auto by_pages = [](Selector selector) {
    return selector == Selector::kAsymmetric || selector == Selector::kHamming ||
           selector == Selector::kOracle;
  };
  const bool any = by_pages(policy.selector) ||
                   (policy.candidate_selector.has_value() && by_pages(*policy.candidate_selector));
  return spec.hash.kind == HashKind::kRotation && any
             ? reference::ScoredEndByPages(n, policy.window_token_count)
             : n - policy.window_token_count;
}

}  // namespace spillway
