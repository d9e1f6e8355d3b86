// What a build without the optional methods refuses.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string>

#include "host/policy/methods.h"
#include "host/policy/policy.h"

namespace spillway {
namespace {

using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::Field;
using ::testing::HasSubstr;

ModelSpec Spec() {
  ModelSpec spec;
  spec.layer_count = 1;
  spec.query_head_count = 8;
  spec.kv_head_count = 2;
  spec.head_dim = 64;
  return spec;
}

auto NoSuchMethod(const char* field) {
  return AllOf(Field(&FieldError::field, field),
               Field(&FieldError::description, HasSubstr("this build has no such method")));
}

TEST(NoMethods, ThereAreTheCores) {
  std::string names;
  for (const SelectorMethod* method : SelectorMethods()) names += std::string(method->name) + " ";
  for (const TailMethod* method : TailMethods()) names += std::string(method->name) + " ";
  EXPECT_EQ(names, "asymmetric oracle all none uniform stratified ");
}

TEST(NoMethods, AModelThatNeedsOneIsRefused) {
  const auto errors = [](void (*change)(ModelSpec&)) {
    ModelSpec spec = Spec();
    change(spec);
    return Normalize(spec);
  };
  EXPECT_THAT(errors([](ModelSpec& s) { s.hash.kind = HashKind::kMlp; }),
              ElementsAre(NoSuchMethod("hash_weights.mlp")));
  EXPECT_THAT(errors([](ModelSpec& s) { s.indices.int4_keys = true; }),
              ElementsAre(NoSuchMethod("key_indices.int4_keys")));
  EXPECT_THAT(errors([](ModelSpec& s) { s.indices.quest_page_token_count = 16; }),
              ElementsAre(NoSuchMethod("key_indices.quest_page_token_count")));
  EXPECT_THAT(errors([](ModelSpec& s) { s.indices.label_channel_count = 8; }),
              ElementsAre(NoSuchMethod("key_indices.label_channel_count")));
  EXPECT_THAT(errors([](ModelSpec& s) { s.indices.lsh_table_count = s.indices.lsh_bits = 8; }),
              ElementsAre(NoSuchMethod("key_indices.lsh_table_count")));
}

TEST(NoMethods, APolicyThatNamesOneIsRefused) {
  ModelSpec spec = Spec();
  ASSERT_TRUE(Normalize(spec).empty());
  const auto errors = [&](void (*change)(Policy&)) {
    Policy policy = DefaultPolicy(spec);
    change(policy);
    return Validate(policy, spec);
  };
  for (const Selector selector :
       {Selector::kHamming, Selector::kInt4Keys, Selector::kQuest, Selector::kDoubleSparsity}) {
    Policy policy = DefaultPolicy(spec);
    policy.selector = selector;
    EXPECT_THAT(Validate(policy, spec), ElementsAre(NoSuchMethod("selector")));
  }
  EXPECT_THAT(errors([](Policy& p) { p.tail = Tail::kLshSampling; }),
              ElementsAre(NoSuchMethod("tail")));
  EXPECT_THAT(errors([](Policy& p) { p.candidate_selector = Selector::kOracle; }),
              ElementsAre(NoSuchMethod("candidates")));
}

}  // namespace
}  // namespace spillway
