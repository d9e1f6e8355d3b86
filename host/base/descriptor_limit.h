#pragma once

#include <cstdint>

namespace spillway {

// Raises the soft limit on descriptors to the hard limit. Returns the limit in force.
int64_t RaiseDescriptorLimit();

// The limit in force on descriptors of this process.
int64_t DescriptorLimit();

// What takes a descriptor of the daemon.
enum class DescriptorUse {
  kConnection,  // anybody's
  kSession,     // of a client that is connected, for its regions
};

// Whether one more would leave too few free descriptors for what the daemon itself opens: regions,
// saved sequences, GPUs. Connections leave an eighth of the limit free, at most 256 descriptors,
// and sessions half of that: so connections cannot keep connected clients from their regions.
bool IsShortOfDescriptors(DescriptorUse use);

}  // namespace spillway
