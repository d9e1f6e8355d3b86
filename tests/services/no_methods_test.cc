// What a build without the optional methods says to clients that ask for them.
#include <functional>
#include <string>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "services/convert/policy.h"

namespace spillway {
namespace {

using ::testing::HasSubstr;

TEST(NoMethods, APolicyThatNamesOneIsRefused) {
  ModelSpec spec;
  spec.layer_count = spec.query_head_count = spec.kv_head_count = 1;
  spec.head_dim = 64;
  ASSERT_TRUE(Normalize(spec).empty());
  const auto message = [&](const std::function<void(v1::Policy&)>& change) {
    v1::Policy patch;
    change(patch);
    return std::string(ApplyPolicy(patch, DefaultPolicy(spec), spec, "policy.").status().message());
  };
  const auto selector = [](v1::Policy& p) { p.set_selector(v1::SELECTOR_INT4_KEYS); };
  EXPECT_THAT(message(selector),
              HasSubstr("policy.selector: SELECTOR_INT4_KEYS: this build has no such method"));
  const auto tail = [](v1::Policy& p) { p.set_tail(v1::TAIL_LSH_SAMPLING); };
  EXPECT_THAT(message(tail),
              HasSubstr("policy.tail: TAIL_LSH_SAMPLING: this build has no such method"));
  const auto staged = [](v1::Policy& p) {
    p.mutable_candidates()->set_selector(v1::SELECTOR_ORACLE);
  };
  EXPECT_THAT(message(staged), HasSubstr("policy.candidates: this build has no such method"));
}

}  // namespace
}  // namespace spillway
