#pragma once

#include "host/policy/method.h"

namespace spillway {

// TAIL_LSH_SAMPLING: samples the tail as MagicPIG does (arXiv 2410.16179).
extern const Method kLshSamplingMethod;

}  // namespace spillway
