#pragma once

#include "host/policy/method.h"

namespace spillway {

// SELECTOR_INT4_KEYS: ranks keys by their elements in four bits, as Twilight's pruner does (arXiv
// 2502.02770, appendix B.1).
extern const Method kInt4KeysMethod;

}  // namespace spillway
