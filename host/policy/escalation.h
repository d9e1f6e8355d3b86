#pragma once

#include "host/policy/policy.h"

namespace spillway {

// How a KV head's tail is sampled at an escalation level of the audit: at level 0 by the policy, at
// higher levels with more rows, at last by dense attention.
struct Escalation {
  TailPolicy tail;
  bool dense = false;
};

// Each level changes one thing: the inflation grows by a quarter, up to 4; then the pilot doubles,
// up to 512 rows; then the tail is uniform with vAttention's `paper` bound and the policy's own
// inflation (unless the policy has this bound already); then attention is dense. A policy without
// an error bound (no tail, a method's tail, or the denominator's bound) does not change. level >=
// 0; levels above DenseLevel() are the same as DenseLevel().
Escalation EscalationAt(const TailPolicy& policy, int level);
// The first level that is dense; 0 for a policy without an error bound.
int DenseLevel(const TailPolicy& policy);

}  // namespace spillway
