// JSON of the API's messages, with the names of their fields and numbers as
// numbers.
#pragma once

#include <google/protobuf/timestamp.pb.h>

#include <string>

#include "absl/time/time.h"
#include "nlohmann/json.hpp"

namespace spillway::cli {

// Keys stay in the order written.
using Json = nlohmann::ordered_json;

inline absl::Time ToTime(const google::protobuf::Timestamp& time) {
  return absl::FromUnixSeconds(time.seconds()) + absl::Nanoseconds(time.nanos());
}

// RFC 3339 in UTC, or null for a time that is not set.
inline Json TimeJson(bool set, const google::protobuf::Timestamp& time) {
  if (!set) return nullptr;
  return absl::FormatTime("%Y-%m-%dT%H:%M:%E3SZ", ToTime(time), absl::UTCTimeZone());
}

}  // namespace spillway::cli
