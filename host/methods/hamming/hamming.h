#pragma once

#include "host/policy/method.h"

namespace spillway {

// SELECTOR_HAMMING: ranks keys by matching bits of codes, of a rotation or of hash MLPs.
extern const Method kHammingMethod;

}  // namespace spillway
