#include "host/policy/effort.h"

#include <algorithm>

namespace spillway {
namespace {

constexpr double kInflationStep = 1.25;
constexpr double kInflationMax = 4;
constexpr int32_t kPilotMax = 512;

bool Promises(const Policy& policy) { return BoundsTheError(policy.tail, policy.bound); }

// Whether there was a step left to make.
bool Raise(const Policy& base, Effort& effort) {
  Policy& p = effort.policy;
  if (effort.dense) return false;
  if (p.tail == Tail::kUniform && p.bound == Bound::kPaper && base.bound != p.bound) {
    effort.dense = true;
  } else if (p.inflation < kInflationMax) {
    p.inflation = std::min(kInflationMax, p.inflation * kInflationStep);
  } else if (p.pilot_token_count < kPilotMax) {
    p.pilot_token_count = std::min(kPilotMax, 2 * p.pilot_token_count);
  } else if (base.tail == Tail::kUniform && base.bound == Bound::kPaper) {
    effort.dense = true;
  } else {
    p.tail = Tail::kUniform;
    p.bound = Bound::kPaper;
    p.inflation = base.inflation;
  }
  return true;
}

}  // namespace

Effort EffortAt(const Policy& policy, int level) {
  Effort effort{policy};
  if (!Promises(policy)) return effort;
  for (int i = 0; i < level && Raise(policy, effort); ++i) {
  }
  return effort;
}

int DenseLevel(const Policy& policy) {
  if (!Promises(policy)) return 0;
  int level = 0;
  for (Effort effort{policy}; Raise(policy, effort); ++level) {
  }
  return level;
}

}  // namespace spillway
