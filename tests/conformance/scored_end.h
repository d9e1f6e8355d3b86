#pragma once

#include "host/policy/policy.h"
#include "tests/reference/page_index.h"

namespace spillway {

// The end of the scored tokens if n tokens are visible; the window follows. If scores come from the
// codes of a rotation, or from an oracle on such a model, the window also covers the open page.
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
