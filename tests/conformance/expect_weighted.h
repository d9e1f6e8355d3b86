#pragma once

#include <string>
#include <vector>

#include "tests/conformance/device_bench.h"
#include "tests/reference/tail.h"

namespace spillway {

// The selection of one (query, KV head) as rows of weight 1 and strata by
// falling rank. How many tokens a stratum has is told by its rows' weights.
struct SelectionParts {
  std::vector<uint32_t> exact;
  std::vector<reference::SampledTokens> strata;
};
SelectionParts SplitSelection(const Selection& selection);

// Expects of an attend that it is weighted attention over the rows that the
// same request selects, and that its certificate is what those rows say.
// promises: whether certificates within epsilon are to say STATISTICAL. The ranks
// hold, and of a model with a rotation the context has 1,024 tokens at least.
void ExpectWeighted(const reference::Context& context, const std::vector<float>& q,
                    const Policy& policy, bool promises, const JobItem& attend,
                    const JobItem& select, const std::string& what);

}  // namespace spillway
