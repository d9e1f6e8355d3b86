#pragma once

#include "host/policy/method.h"

namespace spillway {

// A selector for docs/adding-a-selector.md: ranks keys by the first 16 of their
// elements. One that is added in earnest has a name in the enum.
inline constexpr auto kPrefixSelector = static_cast<Selector>(7);

extern const Method kPrefixMethod;

}  // namespace spillway
