// By what a client's own tracing finds its calls in the daemon's log.
#pragma once

#include <string>
#include <string_view>

#include "absl/status/status.h"

namespace spillway {

// Metadata of calls: W3C Trace Context's, and what proxies and clients without it say.
inline constexpr char kTraceparentMetadata[] = "traceparent";
inline constexpr char kRequestIdMetadata[] = "x-request-id";

// The trace's id, 32 hexadecimal digits. Empty: it is no traceparent
// (version-trace-parent-flags, in lower case; an id is not all zeros).
std::string TraceIdOf(std::string_view traceparent);

// The id as it is. Empty: it is none that goes into a log, of 1 to 128 characters of
// [A-Za-z0-9._:=+/-].
std::string RequestIdOf(std::string_view request_id);

// Of a message's field of that name: empty, or as RequestIdOf() asks. INVALID_ARGUMENT.
absl::Status CheckTraceId(std::string_view trace_id);

}  // namespace spillway
