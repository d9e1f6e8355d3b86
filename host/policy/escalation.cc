#include "host/policy/escalation.h"

#include <algorithm>

namespace spillway {
namespace {

constexpr double kInflationStep = 1.25;
constexpr double kEscalatedInflationMax = 4;
constexpr int32_t kEscalatedPilotMax = 512;

bool Promises(const TailPolicy& policy) { return BoundsTheError(policy.tail, policy.bound); }

// A stratified tail has a bound too, which it does not use.
bool UsesPaperBound(const TailPolicy& policy) {
  return policy.tail == Tail::kUniform && policy.bound == Bound::kPaper;
}

// Goes up one level. Returns false if the escalation is dense already.
bool Raise(const TailPolicy& base, Escalation& escalation) {
  TailPolicy& p = escalation.tail;
  if (escalation.dense) return false;
  if (UsesPaperBound(p) && !UsesPaperBound(base)) {
    escalation.dense = true;
  } else if (p.inflation < kEscalatedInflationMax) {
    p.inflation = std::min(kEscalatedInflationMax, p.inflation * kInflationStep);
  } else if (p.pilot_token_count < kEscalatedPilotMax) {
    p.pilot_token_count = std::min(kEscalatedPilotMax, 2 * p.pilot_token_count);
  } else if (UsesPaperBound(base)) {
    escalation.dense = true;
  } else {
    p.tail = Tail::kUniform;
    p.bound = Bound::kPaper;
    p.inflation = base.inflation;
  }
  return true;
}

}  // namespace

Escalation EscalationAt(const TailPolicy& policy, int level) {
  Escalation escalation{policy};
  if (!Promises(policy)) return escalation;
  for (int i = 0; i < level && Raise(policy, escalation); ++i) {
  }
  return escalation;
}

int DenseLevel(const TailPolicy& policy) {
  if (!Promises(policy)) return 0;
  int level = 0;
  for (Escalation escalation{policy}; Raise(policy, escalation); ++level) {
  }
  return level;
}

}  // namespace spillway
