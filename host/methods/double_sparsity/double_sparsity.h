#pragma once

#include "host/policy/method.h"

namespace spillway {

// SELECTOR_DOUBLE_SPARSITY: of every key a few label channels that the model's
// weights name, in four bits an element (arXiv 2408.07092).
extern const Method kDoubleSparsityMethod;

}  // namespace spillway
