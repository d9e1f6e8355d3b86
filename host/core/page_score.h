#pragma once

#include <cmath>

#include "host/core/exp.h"
#include "host/core/rank_error.h"

// What a page's centre adds to its keys' estimated logits: q.c, once per page
// and query head.
namespace spillway {

// Chain j of q.c, of kRankChains, takes coordinates j, j + 16, ... by fused multiply-adds from 0;
// chains are added as SumChains() does. The result is times log2(e) and the
// softmax scale, and a number: what fp32 cannot hold is cut.
inline constexpr float kCentreLogitMax = 1e37f;
SPILLWAY_HOST_DEVICE inline float CentreLogit(float product, float softmax_scale) {
  const float x = product * (softmax_scale * kExpLog2E);
  if (!(x == x)) return 0.0f;
  return x > kCentreLogitMax ? kCentreLogitMax : x < -kCentreLogitMax ? -kCentreLogitMax : x;
}

// x of host/core/score.h of a key: scaled is the coefficient times the code's
// integer sum, rounded.
SPILLWAY_HOST_DEVICE inline float EstimatedLogit(float scaled, float factor, float centre_logit) {
  return ::fmaf(scaled, factor, centre_logit);
}

}  // namespace spillway
