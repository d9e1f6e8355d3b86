#pragma once

#include "host/policy/method.h"

namespace spillway {

// The example of docs/adding-a-selector.md: a selector that ranks keys by their first 16 elements.
// A real selector has a name in the enum.
inline constexpr auto kPrefixSelector = static_cast<Selector>(7);

extern const Method kPrefixMethod;

}  // namespace spillway
