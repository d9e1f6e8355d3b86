#pragma once

#include <string>

namespace spillway {

// Returns 24 hexadecimal digits from the system's random numbers: unique with near certainty.
// Thread-safe.
std::string RandomId();

}  // namespace spillway
