#pragma once

#include "host/policy/method.h"

namespace spillway {

// A policy's first selection (candidates): one selector finds tokens, and a second one ranks only
// these.
extern const Method kTwoStageMethod;

}  // namespace spillway
