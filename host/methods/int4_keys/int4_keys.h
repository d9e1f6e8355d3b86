#pragma once

#include "host/policy/method.h"

namespace spillway {

// SELECTOR_INT4_KEYS: keys in four bits an element, as Twilight's pruner keeps them
// (arXiv 2502.02770, appendix B.1).
extern const Method kInt4KeysMethod;

}  // namespace spillway
