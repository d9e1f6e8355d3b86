// Repeated output, until a stop is requested.
#pragma once

#include <ostream>
#include <stop_token>

#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/time/time.h"

namespace spillway::cli {

// Waits for `time`. Returns false if a stop was requested.
bool WaitFor(absl::Duration time, const std::stop_token& stop);

// Writes the output of `print` every second, starting now, until `print` fails or a stop is
// requested; a stop is not an error. On a terminal each output overwrites the one before. Elsewhere
// an empty line separates them.
absl::Status Watch(std::ostream& out, bool terminal, const std::stop_token& stop,
                   absl::FunctionRef<absl::Status(std::ostream&)> print);

}  // namespace spillway::cli
