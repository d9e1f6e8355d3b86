// No optional methods, in place of registry.cc where SPILLWAY_METHODS is off.

#include "host/policy/method.h"

namespace spillway {

std::span<const Method* const> OptionalMethods() { return {}; }

}  // namespace spillway
