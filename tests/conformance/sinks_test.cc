// Learned sink logits: each head's softmax has one more row, whose value is 0 and which is always
// read.
#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "tests/conformance/expect_dense.h"
#include "tests/conformance/expect_weighted.h"
#include "tests/conformance/method_models.h"
#include "tests/reference/elements.h"

namespace spillway {
namespace {

using reference::Context;

constexpr float kNoSink = -std::numeric_limits<float>::infinity();

// Two KV heads with three query heads each. The log-sum-exps of the contexts below are 5 to 11.
ModelSpec SpecWithSinks(DType dtype, int layer_count = 1) {
  ModelSpec spec = MakeSpec(2, 3, 64, dtype);
  spec.layer_count = layer_count;
  for (int l = 0; l < layer_count; ++l) {
    for (const float logit : {2.0f, 9.0f, kNoSink, 14.0f, 60.0f, 7.0f}) {
      spec.sink_logits.push_back(logit - 3.0f * static_cast<float>(l));
    }
  }
  return spec;
}

class Sinks : public ::testing::TestWithParam<DeviceFactory> {};

TEST_P(Sinks, DenseAttends) {
  for (const DType dtype : {DType::kF32, DType::kF16, DType::kBF16}) {
    const ModelSpec spec = SpecWithSinks(dtype);
    DeviceBench bench(GetParam(), spec);
    const Context context = reference::GaussianContext(spec, 5000, 3);
    BenchSequence sequence(bench);
    int64_t from = 0;
    for (const int64_t n : {1, 128, 300, 5000}) {
      ASSERT_TRUE(sequence.Append(context, from, n).ok());
      from = n;
      const std::vector<float> q = reference::GaussianQueries(spec, 1, n);
      ExpectDense(context, sequence.Attend(All(), q), q, "n " + std::to_string(n));
    }
    // A chunk of a prompt.
    const std::vector<float> chunk = reference::GaussianQueries(spec, 40, 6);
    ExpectDense(context, sequence.Attend(All(), chunk), chunk, "chunk");
  }
}

TEST_P(Sinks, EveryLayerHasItsOwn) {
  const ModelSpec spec = SpecWithSinks(DType::kF32, 3);
  DeviceBench bench(GetParam(), spec);
  const Context context = reference::GaussianContext(spec, 300, 3);
  const std::vector<float> q = reference::GaussianQueries(spec, 2, 4);
  BenchSequence sequence(bench);
  for (int l = 0; l < 3; ++l) {
    ASSERT_TRUE(sequence.Append(context, 0, 300, 0, l).ok());
    ExpectDense(context, sequence.Attend(All(), q, {}, l), q, "layer " + std::to_string(l), l);
  }
}

TEST_P(Sinks, SeveralSequencesInOneJob) {
  const ModelSpec spec = SpecWithSinks(DType::kBF16);
  DeviceBench bench(GetParam(), spec);
  std::vector<Context> contexts;
  std::vector<std::vector<float>> queries;
  std::vector<std::unique_ptr<BenchSequence>> sequences;
  auto job = std::make_unique<Job>();
  for (int i = 0; i < 3; ++i) {
    contexts.push_back(reference::TraceContext(spec, 300 + 2000 * i, i));
    queries.push_back(reference::TraceQueries(contexts[i], 1 + i, i, 1.5));
    sequences.push_back(std::make_unique<BenchSequence>(bench));
    ASSERT_TRUE(sequences[i]->Append(contexts[i], 0, contexts[i].n).ok());
  }
  for (int i = 0; i < 3; ++i) {
    job->items.push_back(sequences[i]->AttendItem(All(), queries[i], false));
  }
  job = bench.Run(std::move(job));
  for (int i = 0; i < 3; ++i) {
    ExpectDense(contexts[i], job->items[i], queries[i], "item " + std::to_string(i));
  }
}

TEST_P(Sinks, SparseAttends) {
  const ModelSpec spec = SpecWithSinks(DType::kBF16);
  DeviceBench bench(GetParam(), spec);
  const Context context = reference::TraceContext(spec, 4200, 11);
  const std::vector<float> q = reference::TraceQueries(context, 2, 12, 1.5);
  BenchSequence sequence(bench);
  ASSERT_TRUE(sequence.Append(context, 0, context.n).ok());
  for (const Selector selector : {Selector::kAsymmetric, Selector::kOracle}) {
    Policy policy = DefaultPolicy(spec);
    policy.selector = selector;
    policy.seed = 17;
    const auto expect = [&](const Policy& of, bool promises, const char* what) {
      ExpectWeighted(context, q, of, promises, sequence.Attend(of, q), sequence.Select(of, q),
                     what);
    };
    expect(policy, true, "stratified");
    Policy mass = policy;
    mass.heavy_kind = HeavyKind::kMass;
    mass.heavy_mass = 0.5;
    expect(mass, true, "top-p");
    Policy none = policy;
    none.tail = Tail::kNone;
    expect(none, false, "none");
    for (const auto& [bound, promises] :
         {std::pair(Bound::kDenominator, false), std::pair(Bound::kPaper, true),
          std::pair(Bound::kRatio, true)}) {
      Policy uniform = policy;
      uniform.tail = Tail::kUniform;
      uniform.bound = bound;
      expect(uniform, promises, "uniform");
    }
  }
}

// A sink changes how much weight the tail has, and by that how many rows are read; but for a sink
// of no weight the answers are those of a model without sinks, bit for bit.
TEST_P(Sinks, OfNoWeightChangeNothing) {
  ModelSpec with = SpecWithSinks(DType::kBF16);
  with.sink_logits.assign(with.query_head_count, kNoSink);
  ModelSpec without = with;
  without.sink_logits.clear();
  const Context context = reference::TraceContext(without, 4200, 11);
  const std::vector<float> q = reference::TraceQueries(context, 1, 12, 1.5);
  const auto attend = [&](const ModelSpec& spec, const Policy& policy) {
    DeviceBench bench(GetParam(), spec);
    BenchSequence sequence(bench);
    EXPECT_TRUE(sequence.Append(context, 0, context.n).ok());
    return sequence.Attend(policy, q).result;
  };
  for (const Policy& policy : {DefaultPolicy(without), All()}) {
    EXPECT_EQ(attend(with, policy).out, attend(without, policy).out);
    EXPECT_EQ(attend(with, policy).lse, attend(without, policy).lse);
  }
}

// A decode step gives what an append and an attend give.
TEST_P(Sinks, DecodeSteps) { ExpectStepsAppendAndAttend(GetParam(), SpecWithSinks(DType::kBF16)); }

// The sample of LSH does not depend on sinks, so the output is that without them, times the rows'
// share of the softmax.
TEST_P(Sinks, LshSampling) {
  const IndexedModel model(2, 3, 64, DType::kBF16,
                           {.lsh_table_count = 64, .lsh_bits = 6, .lsh_seed = 3});
  ModelSpec with = model.spec;
  with.sink_logits = SpecWithSinks(DType::kBF16).sink_logits;
  const Context context = reference::TraceContext(with, 4200, 11);
  const std::vector<float> q = reference::TraceQueries(context, 1, 12, 1.5);
  Policy policy = DefaultPolicy(with);
  policy.tail = Tail::kLshSampling;
  policy.heavy_kind = HeavyKind::kCount;
  if (!IsBuilt(policy)) GTEST_SKIP();
  const auto attend = [&](const ModelSpec& spec) {
    DeviceBench bench(GetParam(), spec);
    BenchSequence sequence(bench);
    EXPECT_TRUE(sequence.Append(context, 0, context.n).ok());
    return sequence.Attend(policy, q);
  };
  const JobItem got = attend(with), plain = attend(model.spec);
  ASSERT_TRUE(got.status.ok() && plain.status.ok()) << got.status << plain.status;
  for (int h = 0; h < 6; ++h) {
    const double rows = plain.result.lse[h];
    const double share = 1 / (1 + std::exp(with.sink_logits[h] - rows));
    std::vector<double> wanted;
    for (const float x : OutputOf(with, plain.result, 0, h)) wanted.push_back(share * x);
    EXPECT_LT(reference::RelativeDistance(OutputOf(with, got.result, 0, h), wanted), 1e-5);
    EXPECT_NEAR(got.result.lse[h], rows - std::log(share), 1e-5);
    EXPECT_NEAR(got.result.certificates[h].tail_mass,
                share * plain.result.certificates[h].tail_mass, 1e-5);
  }
}

INSTANTIATE_TEST_SUITE_P(Devices, Sinks, ::testing::ValuesIn(DeviceFactories()),
                         [](const auto& info) { return info.param.name; });

}  // namespace
}  // namespace spillway
