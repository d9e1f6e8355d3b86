#pragma once

#include "absl/status/status.h"
#include "daemon/engine/engine.h"

namespace spillway {

// A refusal for want of memory, with what holds the memory: kinds by bytes and
// the sequence with the most. Any other status as it is. Thread-safe.
absl::Status NameHolders(const absl::Status& status, Engine& engine);

}  // namespace spillway
