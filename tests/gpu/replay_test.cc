// A GPU replays the attends of a decoding sequence as graphs. The results must not depend on that,
// and nothing in the attends may wait for the GPU.
#include "tests/gpu/replay.h"

#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "gpu/cuda/graph.h"
#include "gpu/cuda/stream.h"

namespace spillway {
namespace {

std::vector<Case> Cases(const ModelSpec& spec) {
  Policy base = DefaultPolicy(spec);
  base.dense_token_count = 1024;
  std::vector<Case> cases{{"default", base}};
  Policy policy = base;
  policy.tail = Tail::kNone;
  cases.push_back({"no tail", policy});
  policy.selector = Selector::kHamming;
  if (IsBuilt(policy)) cases.push_back({"hamming", policy});
  policy = base;
  policy.heavy_kind = HeavyKind::kMass;
  cases.push_back({"by mass", policy});
  policy = base;
  policy.selector = Selector::kOracle;
  cases.push_back({"oracle", policy});
  policy = base;
  policy.row_count_max = 700;
  cases.push_back({"limited", policy});
  return cases;
}

// A wave runs directly the first time, is captured the second time, and is replayed from then on.
// If a capture fails, the attend fails.
TEST(Replay, DecodingGivesTheBitsOfASequenceThatIsNew) {
  SKIP_WITHOUT_GPU();
  const ModelSpec spec = MakeSpec(2, 4, 64, DType::kBF16);
  const reference::Context context = reference::TraceContext(spec, 6000, 71);
  const std::vector<float> q = reference::TraceQueries(context, 1, 73, 1.5);
  DeviceBench bench(*CudaFactory(), spec);
  for (const Case& c : Cases(spec)) {
    // At 4,096 tokens the grids change, and new pages of rows and codes begin.
    ExpectBitsOfANewSequence(bench, context, c, q, [](int64_t n) { return n < 4080 ? 37 : 3; });
  }
}

TEST(Replay, SeveralSequencesAndModelsOnOneDevice) {
  SKIP_WITHOUT_GPU();
  const ModelSpec spec = MakeSpec(2, 4, 64, DType::kBF16);
  const reference::Context one = reference::TraceContext(spec, 3000, 81);
  const reference::Context two = reference::TraceContext(spec, 3000, 82);
  const std::vector<float> q = reference::TraceQueries(one, 1, 83, 1.5);
  DeviceBench bench(*CudaFactory(), spec);
  BenchSequence a(bench), b(bench);
  ASSERT_TRUE(a.Append(one, 0, 3000).ok());
  ASSERT_TRUE(b.Append(two, 0, 2900).ok());
  const Policy policy = DefaultPolicy(spec);
  const JobItem first_a = a.Attend(policy, q);
  const JobItem first_b = b.Attend(policy, q);
  for (int i = 0; i < 4; ++i) {
    ExpectSame(a.Attend(policy, q), first_a, "a");
    ExpectSame(b.Attend(policy, q), first_b, "b");
  }
}

// Steps write new pages, codes in pages that are not in order, and rows that stay on the GPU. The
// result is that of one append of all tokens.
TEST(Replay, StepsLeaveWhatOneAppendDoes) {
  SKIP_WITHOUT_GPU();
  for (const int step : {1, 3, 16}) {
    const ModelSpec spec = MakeSpec(2, 4, 64, DType::kBF16);
    const reference::Context context = reference::TraceContext(spec, 4000, 91);
    const std::vector<float> q = reference::TraceQueries(context, step, 93, 1.5);
    const std::vector<float> one = reference::TraceQueries(context, 1, 95, 1.5);
    const Policy policy = DefaultPolicy(spec);
    DeviceBench bench(*CudaFactory(), spec), fresh(*CudaFactory(), spec);
    BenchSequence stepping(bench), plain(fresh);
    ASSERT_TRUE(stepping.Append(context, 0, 2900).ok());
    // Also a short sequence, whose attends are dense at first.
    BenchSequence young(bench), young_plain(fresh);
    ASSERT_TRUE(young.Append(context, 0, 1000).ok());
    for (int i = 0; i < 96 / step + 4; ++i) {
      ASSERT_TRUE(stepping.Step(context, policy, q).status.ok());
      ASSERT_TRUE(young.Step(context, policy, q).status.ok());
    }
    ASSERT_TRUE(plain.Append(context, 0, stepping.token_count()).ok());
    ExpectSame(stepping.Attend(policy, one), plain.Attend(policy, one), "steps");
    ASSERT_TRUE(young.Append(context, young.token_count(), 2200).ok());
    ASSERT_TRUE(young_plain.Append(context, 0, 2200).ok());
    ExpectSame(young.Attend(policy, one), young_plain.Attend(policy, one), "a young sequence");
    // The resident sample and the ring hold the rows of these tokens, so equally many rows move.
    const JobItem attend = stepping.Attend(policy, one);
    EXPECT_EQ(attend.result.moved_row_count, plain.Attend(policy, one).result.moved_row_count);
  }
}

// If an attend finds no memory, its append is undone, and the pages that the append would have
// begun stay as they were.
TEST(Replay, AStepWithoutMemoryChangesNothing) {
  SKIP_WITHOUT_GPU();
  constexpr int kQueries = 600;
  const ModelSpec spec = MakeSpec(2, 4, 64, DType::kBF16);
  const reference::Context context = reference::TraceContext(spec, 6000, 97);
  const std::vector<float> q = reference::TraceQueries(context, kQueries, 98, 1.5);
  const std::vector<float> one = reference::TraceQueries(context, 1, 99, 1.5);
  const Policy policy = DefaultPolicy(spec);
  for (const int64_t n : {900, 3000, 4090}) {
    DeviceBench bench(*CudaFactory(), spec), fresh(*CudaFactory(), spec);
    BenchSequence sequence(bench), plain(fresh);
    ASSERT_TRUE(sequence.Append(context, 0, n).ok());
    ASSERT_TRUE(sequence.Step(context, policy, one).status.ok());
    // Free pages are left, but no memory for the queries.
    {
      BenchSequence gone(bench);
      ASSERT_TRUE(gone.Append(context, 0, 6000).ok());
    }
    {
      const auto all = bench.budget().Reserve(bench.budget().free_bytes(), "a test");
      ASSERT_TRUE(all.ok()) << all.status();
      const JobItem refused = sequence.Step(context, policy, q);
      EXPECT_EQ(refused.status.code(), absl::StatusCode::kResourceExhausted) << refused.status;
      EXPECT_EQ(sequence.token_count(), n + 1);
    }
    for (int i = 0; i < 10; ++i) ASSERT_TRUE(sequence.Step(context, policy, one).status.ok());
    ASSERT_TRUE(plain.Append(context, 0, sequence.token_count()).ok());
    ExpectSame(sequence.Attend(policy, one), plain.Attend(policy, one), std::to_string(n));
    // Once there is memory, the same step is served.
    EXPECT_TRUE(sequence.Step(context, policy, q).status.ok());
  }
}

TEST(Graph, ACaptureThatWaitsFails) {
  SKIP_WITHOUT_GPU();
  const cuda::Stream stream = cuda::Stream::Create().value();
  const auto waiting = cuda::Graph::Capture(stream.get(), [&]() -> absl::Status {
    return cuda::ToStatus(cudaStreamSynchronize(stream.get()), "cudaStreamSynchronize");
  });
  EXPECT_FALSE(waiting.ok());
  // Afterwards the stream is usable, and work that does not wait can be captured.
  const auto empty = cuda::Graph::Capture(stream.get(), [] { return absl::OkStatus(); });
  ASSERT_TRUE(empty.ok()) << empty.status();
  EXPECT_TRUE(empty->Launch(stream.get()).ok());
  EXPECT_EQ(cudaStreamSynchronize(stream.get()), cudaSuccess);
}

}  // namespace
}  // namespace spillway
