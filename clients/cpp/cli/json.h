// The API's messages as JSON, with the same field names, and with numbers as numbers.
#pragma once

#include <google/protobuf/timestamp.pb.h>

#include <string>

#include "absl/time/time.h"
#include "nlohmann/json.hpp"

namespace spillway::cli {

// Keeps keys in the order in which they were added.
using Json = nlohmann::ordered_json;

inline absl::Time ToTime(const google::protobuf::Timestamp& time) {
  return absl::FromUnixSeconds(time.seconds()) + absl::Nanoseconds(time.nanos());
}

// RFC 3339 in UTC; null if the time is not set.
inline Json TimeJson(bool set, const google::protobuf::Timestamp& time) {
  if (!set) return nullptr;
  return absl::FormatTime("%Y-%m-%dT%H:%M:%E3SZ", ToTime(time), absl::UTCTimeZone());
}

}  // namespace spillway::cli
