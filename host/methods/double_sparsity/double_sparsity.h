#pragma once

#include "host/policy/method.h"

namespace spillway {

// SELECTOR_DOUBLE_SPARSITY: ranks keys by a few of their channels, with four bits per element. The
// model's weights name these label channels (arXiv 2408.07092).
extern const Method kDoubleSparsityMethod;

}  // namespace spillway
