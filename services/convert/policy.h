#pragma once

#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "host/policy/policy.h"
#include "spillway/v1/policy.pb.h"

namespace spillway {

// Returns `base` with the fields that `patch` sets, valid for the model. INVALID_ARGUMENT names
// every field that is out of range or impossible together with the others, with `prefix` (such as
// "policy.") before its path.
absl::StatusOr<Policy> ApplyPolicy(const v1::Policy& patch, const Policy& base,
                                   const ModelSpec& spec, const std::string& prefix);

// Sets every field that applies to the policy.
v1::Policy ToProto(const Policy& policy);

}  // namespace spillway
