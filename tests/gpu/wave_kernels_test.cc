#include "gpu/device/wave_kernels.h"

#include <gtest/gtest.h>

#include <string>

#include "host/policy/methods.h"

namespace spillway::cuda {
namespace {

// The GPU device runs every method that the CPU device of this build runs.
TEST(CheckServed, TakesEveryMethodOfTheBuild) {
  for (const SelectorMethod* method : SelectorMethods()) {
    Policy policy;
    policy.selector = method->selector;
    EXPECT_TRUE(CheckServed(policy, "cuda:0").ok()) << method->name;
  }
  for (const TailMethod* method : TailMethods()) {
    Policy policy;
    policy.tail = method->tail;
    EXPECT_TRUE(CheckServed(policy, "cuda:0").ok()) << method->name;
  }
  Policy policy;
  policy.candidate_selector = Selector::kOracle;
  EXPECT_EQ(CheckServed(policy, "cuda:0").ok(), HasFirstSelection());
}

TEST(CheckServed, NamesWhatHasNoKernels) {
  Policy policy;
  policy.selector = static_cast<Selector>(200);
  const absl::Status selector = CheckServed(policy, "cuda:1");
  EXPECT_EQ(selector.code(), absl::StatusCode::kUnimplemented);
  EXPECT_EQ(std::string(selector.message()), "SELECTOR_200 is not implemented on cuda:1");
  policy = {};
  policy.tail = static_cast<Tail>(201);
  const absl::Status tail = CheckServed(policy, "cuda:1");
  EXPECT_EQ(tail.code(), absl::StatusCode::kUnimplemented);
  EXPECT_EQ(std::string(tail.message()), "TAIL_201 is not implemented on cuda:1");
}

}  // namespace
}  // namespace spillway::cuda
