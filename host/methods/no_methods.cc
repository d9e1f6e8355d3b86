// Without optional methods: compiled instead of registry.cc if SPILLWAY_METHODS is off.

#include "host/policy/method.h"

namespace spillway {

std::span<const Method* const> OptionalMethods() { return {}; }

}  // namespace spillway
