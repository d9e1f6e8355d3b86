#pragma once

#include <string>
#include <vector>

#include "tests/conformance/device_bench.h"
#include "tests/reference/tail.h"

namespace spillway {

// The selection of one (query, KV head): rows of weight 1, and the sampled rows of the strata by
// falling rank. The token count of a stratum follows from the weights of its rows.
struct SelectionParts {
  std::vector<uint32_t> exact;
  std::vector<reference::SampledTokens> strata;
};
SelectionParts SplitSelection(const Selection& selection);

// Expects that an attend is weighted attention over the rows that a Select with the same request
// returns, and that its certificates follow from these rows.
// promises: whether certificates within epsilon must say STATISTICAL. The ranks must hold, and with
// a rotation, the context must have at least 1,024 tokens.
void ExpectWeighted(const reference::Context& context, const std::vector<float>& q,
                    const Policy& policy, bool promises, const JobItem& attend,
                    const JobItem& select, const std::string& what);

}  // namespace spillway
