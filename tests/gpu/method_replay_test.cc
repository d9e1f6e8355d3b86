// Waves with a request to methods, which graphs copy to the GPU anew at every
// replay.
#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "tests/conformance/method_models.h"
#include "tests/gpu/replay.h"

namespace spillway {
namespace {

std::vector<Case> MethodCases(const ModelSpec& spec) {
  Policy base = DefaultPolicy(spec);
  base.dense_token_count = 1024;
  std::vector<Case> cases;
  Policy policy = base;
  policy.tail = Tail::kLshSampling;
  cases.push_back({"LSH sampling", policy});
  policy = base;
  policy.tail = Tail::kNone;
  policy.selector = Selector::kDoubleSparsity;
  cases.push_back({"double sparsity", policy});
  policy.selector = Selector::kQuest;
  cases.push_back({"quest", policy});
  policy = base;
  policy.candidate_selector = Selector::kHamming;
  cases.push_back({"two stages", policy});
  policy.tail = Tail::kLshSampling;
  policy.candidate_selector = Selector::kInt4Keys;
  cases.push_back({"two stages and LSH sampling", policy});
  return cases;
}

TEST(MethodReplay, DecodingGivesTheBitsOfASequenceThatIsNew) {
  SKIP_WITHOUT_GPU();
  const IndexedModel model(2, 4, 64, DType::kBF16, EveryIndex());
  const reference::Context context = reference::TraceContext(model.spec, 6000, 75);
  const std::vector<float> q = reference::TraceQueries(context, 1, 77, 1.5);
  DeviceBench bench(*CudaFactory(), model.spec, 0, model.file);
  for (const Case& c : MethodCases(model.spec)) {
    ASSERT_TRUE(Validate(c.policy, model.spec).empty()) << c.name;
    ExpectBitsOfANewSequence(
        bench, context, c, q, [](int64_t) { return 19; }, model.file);
  }
}

}  // namespace
}  // namespace spillway
