#pragma once

#include <string>

namespace spillway {

// 24 hexadecimal digits from the system, nobody else's with near certainty. Thread-safe.
std::string RandomId();

}  // namespace spillway
