#pragma once

#include <cmath>

#include "host/core/exp.h"
#include "host/core/rank_error.h"

// The centre logit q.c of a page, computed once per page and query head: the part that the page's
// centre adds to the estimated logits of its keys.
namespace spillway {

// product: q.c in fp32, summed in kRankChains chains. Chain j takes coordinates j, j + 16, ... by
// fused multiply-adds from 0, and SumChains() adds the chains. The result is product times log2(e)
// times the softmax scale. It is finite: it is limited to +-kCentreLogitMax, and NaN becomes 0.
inline constexpr float kCentreLogitMax = 1e37f;
SPILLWAY_HOST_DEVICE inline float CentreLogit(float product, float softmax_scale) {
  const float x = product * (softmax_scale * kExpLog2E);
  if (!(x == x)) return 0.0f;
  return x > kCentreLogitMax ? kCentreLogitMax : x < -kCentreLogitMax ? -kCentreLogitMax : x;
}

// x_h of host/core/score.h for one key. scaled: QueryCoefficient() times the integer sum of the
// key's code, rounded to fp32.
SPILLWAY_HOST_DEVICE inline float EstimatedLogit(float scaled, float factor, float centre_logit) {
  return ::fmaf(scaled, factor, centre_logit);
}

}  // namespace spillway
