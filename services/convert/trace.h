// Trace ids, with which a client finds its calls in the daemon's log.
#pragma once

#include <string>
#include <string_view>

#include "absl/status/status.h"

namespace spillway {

// Keys of call metadata: that of W3C Trace Context, and the one that proxies and clients without it
// use.
inline constexpr char kTraceparentMetadata[] = "traceparent";
inline constexpr char kRequestIdMetadata[] = "x-request-id";

// The trace id in a traceparent, 32 hexadecimal digits. Empty if the text is no valid traceparent
// (version-trace-parent-flags, in lower case; ids are not all zeros).
std::string TraceIdOf(std::string_view traceparent);

// The id itself, or empty if it may not go into the log: valid are 1 to 128 characters of
// [A-Za-z0-9._:=+/-].
std::string RequestIdOf(std::string_view request_id);

// Checks the field trace_id of a message: it may be empty, or valid for RequestIdOf().
// INVALID_ARGUMENT.
absl::Status CheckTraceId(std::string_view trace_id);

}  // namespace spillway
