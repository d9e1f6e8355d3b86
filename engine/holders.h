#pragma once

#include "absl/status/status.h"
#include "engine/engine.h"

namespace spillway {

// If the status is a refusal because memory is exhausted, adds to its message what holds the
// memory: bytes by kind of use, and the largest sequence. Returns any other status as it is.
// Thread-safe.
absl::Status NameHolders(const absl::Status& status, Engine& engine);

}  // namespace spillway
