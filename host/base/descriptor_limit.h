#pragma once

#include <cstdint>

namespace spillway {

// Raises the soft limit on descriptors to the hard limit. Returns the limit in force.
int64_t RaiseDescriptorLimit();

// The limit in force on descriptors of this process.
int64_t DescriptorLimit();

// Whether one more connection would leave too few free descriptors for what the daemon itself
// opens: regions, saved sequences, GPUs. It keeps an eighth of the limit free, at most 256
// descriptors.
bool IsShortOfDescriptors();

}  // namespace spillway
