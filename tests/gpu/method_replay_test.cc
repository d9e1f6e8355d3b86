// Waves with a request for methods, which is copied to the GPU before every replay of their graph.
#include <gtest/gtest.h>

#include <map>
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
  Policy twilight = policy;
  twilight.tail = Tail::kNone;
  twilight.candidate_selector = Selector::kQuest;
  twilight.selector = Selector::kInt4Keys;
  twilight.heavy_kind = HeavyKind::kMass;
  cases.push_back({"two stages by mass", twilight});
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

// Attends of 16 queries, then of fewer, then of 16 again.
TEST(MethodReplay, AttendsOfAnyNumberOfQueriesGiveTheirFirstBits) {
  SKIP_WITHOUT_GPU();
  const IndexedModel model(2, 3, 64, DType::kBF16, EveryIndex());
  const reference::Context context = reference::TraceContext(model.spec, 6000, 85);
  DeviceBench bench(*CudaFactory(), model.spec, 0, model.file);
  BenchSequence sequence(bench);
  ASSERT_TRUE(sequence.Append(context, 0, 6000).ok());
  std::map<int, std::vector<float>> queries;  // by number of queries
  for (const int count : {16, 9, 1}) {
    queries[count] = reference::TraceQueries(context, count, 87 + count, 1.5);
  }
  for (const Case& c : MethodCases(model.spec)) {
    std::map<int, JobItem> first;
    for (const int count : {16, 9, 1}) {
      first[count] = sequence.Attend(c.policy, queries[count]);
      ASSERT_TRUE(first[count].status.ok()) << c.name << ": " << first[count].status;
    }
    // Each wave has run directly. Now it is captured, then replayed.
    for (int round = 0; round < 4; ++round) {
      for (const int count : {16, 9, 1}) {
        for (int again = 0; again < 3; ++again) {
          ExpectSame(sequence.Attend(c.policy, queries[count]), first[count],
                     c.name + " of " + std::to_string(count));
        }
      }
    }
  }
}

}  // namespace
}  // namespace spillway
