// Printing over and over, until somebody stops it.
#pragma once

#include <ostream>
#include <stop_token>

#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/time/time.h"

namespace spillway::cli {

// Waits; false where it was stopped before.
bool WaitFor(absl::Duration time, const std::stop_token& stop);

// Once a second, beginning now, writes what `print` writes, until it fails or is stopped, which is
// no error. On a terminal each takes the place of the one before; elsewhere an empty line stands
// between.
absl::Status Watch(std::ostream& out, bool terminal, const std::stop_token& stop,
                   absl::FunctionRef<absl::Status(std::ostream&)> print);

}  // namespace spillway::cli
