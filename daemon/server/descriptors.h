#pragma once

#include <cstdint>

namespace spillway {

// Raises the soft limit on descriptors to the hard limit. Returns the limit in force.
int64_t RaiseDescriptorLimit();

// Whether one more connection would leave too few free descriptors for what the daemon itself
// opens: regions, saved sequences, GPUs. It keeps an eighth of the limit free, at most 256
// descriptors.
bool IsShortOfDescriptors();

}  // namespace spillway
