#pragma once

#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "host/policy/policy.h"
#include "spillway/v1/policy.pb.h"

namespace spillway {

// `base` with the fields that `patch` sets, valid for the model.
// INVALID_ARGUMENT names every field that is out of range or impossible beside
// the others, with `prefix` ("policy.") before its path.
absl::StatusOr<Policy> ApplyPolicy(const v1::Policy& patch, const Policy& base,
                                   const ModelSpec& spec, const std::string& prefix);

// Every field set.
v1::Policy ToProto(const Policy& policy);

}  // namespace spillway
