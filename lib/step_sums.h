#pragma once

#include <cstdint>

#include "lib/spillway.h"
#include "spillway/v1/attention_service.pb.h"

namespace spillway {

// The sums over the results that succeeded. token_count: queries of each sequence.
spillway_sums SumsOf(const v1::AttendResponse& results, int64_t token_count);

}  // namespace spillway
