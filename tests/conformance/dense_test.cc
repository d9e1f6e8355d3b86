// The selector `all` is dense attention up to rounding, at every length and shape.
#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "tests/conformance/expect_dense.h"
#include "tests/reference/elements.h"

namespace spillway {
namespace {

using reference::Context;

class Dense : public ::testing::TestWithParam<DeviceFactory> {};

TEST_P(Dense, EveryShapeAndType) {
  for (const DType dtype : {DType::kF32, DType::kF16, DType::kBF16}) {
    for (const int d : {64, 80, 96, 128, 256}) {
      const ModelSpec spec = MakeSpec(2, 3, d, dtype);
      DeviceBench bench(GetParam(), spec);
      const Context context = reference::GaussianContext(spec, 300, d);
      const std::vector<float> q = reference::GaussianQueries(spec, 1, d + 1);
      BenchSequence sequence(bench);
      int64_t from = 0;
      for (const int64_t n : {1, 2, 127, 128, 129, 300}) {
        ASSERT_TRUE(sequence.Append(context, from, n).ok());
        from = n;
        ExpectDense(context, sequence.Attend(All(), q), q,
                    std::string(DTypeName(dtype)) + " d " + std::to_string(d));
      }
    }
  }
}

TEST_P(Dense, EveryGroupSize) {
  for (int group = 1; group <= kGroupMax; ++group) {
    const ModelSpec spec = MakeSpec(2, group, 64, DType::kBF16);
    DeviceBench bench(GetParam(), spec);
    const Context context = reference::GaussianContext(spec, 200, group);
    const std::vector<float> q = reference::GaussianQueries(spec, 2, group);
    BenchSequence sequence(bench);
    ASSERT_TRUE(sequence.Append(context, 0, 200).ok());
    ExpectDense(context, sequence.Attend(All(), q), q, "G " + std::to_string(group));
  }
}

// With bf16 keys, queries whose elements are all bf16 numbers take another code path.
TEST_P(Dense, LongContextsAndQueriesOfEitherPrecision) {
  const ModelSpec spec = MakeSpec(2, 2, 64, DType::kBF16);
  DeviceBench bench(GetParam(), spec);
  const Context context = reference::TraceContext(spec, 10000, 3);
  std::vector<float> q = reference::TraceQueries(context, 1, 4, 1.5);
  BenchSequence sequence(bench);
  int64_t from = 0;
  for (const int64_t n : {2047, 2048, 2049, 4096, 4097, 10000}) {
    ASSERT_TRUE(sequence.Append(context, from, n).ok());
    from = n;
    ExpectDense(context, sequence.Attend(All(), q), q, "fp32 queries");
    std::vector<float> rounded(q);
    for (float& x : rounded) x = static_cast<float>(reference::Round(DType::kBF16, x));
    ExpectDense(context, sequence.Attend(All(), rounded), rounded, "bf16 queries");
  }
}

TEST_P(Dense, SparsePoliciesAreDenseWhileNothingIsLeftForATail) {
  const ModelSpec spec = MakeSpec(1, 2, 64, DType::kF32);
  DeviceBench bench(GetParam(), spec);
  const Context context = reference::TraceContext(spec, 2048, 5);
  const std::vector<float> q = reference::TraceQueries(context, 1, 6, 1.5);
  BenchSequence sequence(bench);
  const Policy policy = DefaultPolicy(spec);
  int64_t from = 0;
  // 128 = sink + window. Up to 2,048 = dense_token_count, attends are dense.
  for (const int64_t n : {1, 127, 128, 129, 384, 1024, 2048}) {
    ASSERT_TRUE(sequence.Append(context, from, n).ok());
    from = n;
    ExpectDense(context, sequence.Attend(policy, q), q, "default policy");
  }
  Policy all_heavy = policy;
  all_heavy.dense_token_count = 1024;
  all_heavy.heavy_kind = HeavyKind::kCount;
  all_heavy.heavy_count = 2048 - 128;
  ExpectDense(context, sequence.Attend(all_heavy, q), q, "every candidate heavy");
  Policy dense_layer = policy;
  dense_layer.dense_token_count = 1024;
  dense_layer.dense_layers = {0};
  ExpectDense(context, sequence.Attend(dense_layer, q), q, "dense layer");
}

TEST_P(Dense, SeveralQueriesAreCausalAndSeeWhatTheyName) {
  const ModelSpec spec = MakeSpec(2, 3, 80, DType::kF16);
  DeviceBench bench(GetParam(), spec);
  const Context context = reference::GaussianContext(spec, 700, 7);
  BenchSequence sequence(bench);
  ASSERT_TRUE(sequence.Append(context, 0, 700).ok());
  for (const int64_t count : {2, 16, 17, 40}) {
    const std::vector<float> q = reference::GaussianQueries(spec, count, count);
    ExpectDense(context, sequence.Attend(All(), q), q, "causal");
    std::vector<int64_t> visible;
    for (int64_t t = 0; t < count; ++t) visible.push_back(1 + t * 389 % 700);
    ExpectDense(context, sequence.Attend(All(), q, visible), q, "explicit");
  }
}

TEST_P(Dense, SeveralSequencesInOneJob) {
  const ModelSpec spec = MakeSpec(2, 2, 64, DType::kBF16);
  DeviceBench bench(GetParam(), spec);
  std::vector<Context> contexts;
  std::vector<std::vector<float>> queries;
  std::vector<std::unique_ptr<BenchSequence>> sequences;
  auto job = std::make_unique<Job>();
  for (int i = 0; i < 5; ++i) {
    contexts.push_back(reference::GaussianContext(spec, 50 + 200 * i, i));
    queries.push_back(reference::GaussianQueries(spec, 1 + i, i));
    sequences.push_back(std::make_unique<BenchSequence>(bench));
    ASSERT_TRUE(sequences[i]->Append(contexts[i], 0, contexts[i].n).ok());
  }
  for (int i = 0; i < 5; ++i) {
    job->items.push_back(sequences[i]->AttendItem(All(), queries[i], false));
  }
  job = bench.Run(std::move(job));
  for (int i = 0; i < 5; ++i) {
    ExpectDense(contexts[i], job->items[i], queries[i], "item " + std::to_string(i));
  }
}

INSTANTIATE_TEST_SUITE_P(Devices, Dense, ::testing::ValuesIn(DeviceFactories()),
                         [](const auto& info) { return info.param.name; });

}  // namespace
}  // namespace spillway
