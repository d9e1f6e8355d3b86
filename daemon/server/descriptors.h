#pragma once

#include <cstdint>

namespace spillway {

// Raises the process's limit of descriptors to what it may raise it to. The limit
// in force.
int64_t RaiseDescriptorLimit();

// Whether a connection would leave too few descriptors for what the daemon opens
// itself: regions, saved sequences, GPUs. Below an eighth of the limit, and 256, is
// too few.
bool IsShortOfDescriptors();

}  // namespace spillway
