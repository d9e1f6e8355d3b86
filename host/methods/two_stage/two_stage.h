#pragma once

#include "host/policy/method.h"

namespace spillway {

// A policy's first selection (candidates): one selector finds the tokens that
// another one ranks.
extern const Method kTwoStageMethod;

}  // namespace spillway
