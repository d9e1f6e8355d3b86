#pragma once

#include "host/policy/policy.h"

namespace spillway {

// How a head's tail is sampled at an escalation level: by the policy at level 0,
// then by steps of more inflation, of a larger pilot, vAttention's `paper` budget
// over a uniform tail, and at last dense attention.
struct Escalation {
  TailPolicy tail;
  bool dense = false;
};

// What each level adds: a quarter to the inflation up to 4, then twice the
// pilot up to 512 rows, then the `paper` budget with the policy's own
// inflation, then nothing is left to chance. A policy that promises nothing
// (no tail, or the denominator's bound) stays as it is. level >= 0; above
// DenseLevel() as there.
Escalation EscalationAt(const TailPolicy& policy, int level);
// The first level that is dense; 0 for a policy that promises nothing.
int DenseLevel(const TailPolicy& policy);

}  // namespace spillway
