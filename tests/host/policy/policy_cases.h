// Shared by the tests of policies.
#pragma once

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "host/policy/policy.h"

namespace spillway {

// A model with four layers, and 8 query heads over 2 KV heads of dimension 64.
inline ModelSpec Spec(HashKind kind = HashKind::kRotation) {
  ModelSpec spec;
  spec.layer_count = 4;
  spec.query_head_count = 8;
  spec.kv_head_count = 2;
  spec.head_dim = 64;
  spec.hash.kind = kind;
  EXPECT_THAT(Normalize(spec), ::testing::IsEmpty());
  return spec;
}

// One change to the default policy, and the field that the error must name.
struct BadCase {
  const char* field;
  void (*change)(Policy&);
};

inline void ExpectRefused(const BadCase& bad) {
  const ModelSpec spec = Spec();
  Policy policy = DefaultPolicy(spec);
  bad.change(policy);
  EXPECT_THAT(Validate(policy, spec),
              ::testing::Contains(::testing::Field(&FieldError::field, bad.field)));
}

inline void Mass(Policy& p) { p.heavy_kind = HeavyKind::kMass; }

}  // namespace spillway
