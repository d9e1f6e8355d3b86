#pragma once

#include <vector>

#include "absl/status/statusor.h"
#include "host/device/device.h"

namespace spillway {

// Exact attention of one query over its visible rows, as the policy `all` computes it, in this
// thread alone. Returns out [H_q, d]. Reads only rows, q, q_dtype and visible of `attend`, for its
// query 0. OUT_OF_RANGE names a token whose logit is not finite; CANCELLED.
absl::StatusOr<std::vector<float>> ExactAttend(const ModelSpec& spec, int layer, AttendQuery attend,
                                               const CancelToken* cancel);

}  // namespace spillway
