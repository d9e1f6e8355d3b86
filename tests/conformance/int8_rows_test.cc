// Rows of 8 bits: attends, codes and certificates are of the rows as they are stored, which
// tests/reference/int8_rows.h computes from the definition.
#include "tests/reference/int8_rows.h"

#include <gtest/gtest.h>

#include <string>
#include <tuple>
#include <vector>

#include "tests/conformance/expect_dense.h"
#include "tests/conformance/expect_weighted.h"

namespace spillway {
namespace {

using reference::Context;

ModelSpec SpecOf(int kv_heads, int group, int head_dim, DType dtype) {
  ModelSpec spec = MakeSpec(kv_heads, group, head_dim, dtype);
  spec.row_type = RowType::kInt8;
  return spec;
}

class Int8Rows : public ::testing::TestWithParam<DeviceFactory> {};

TEST_P(Int8Rows, DenseAttends) {
  for (const DType dtype : {DType::kF32, DType::kF16, DType::kBF16}) {
    for (const auto& [d, group] : {std::pair(64, 3), std::pair(80, 1), std::pair(128, 4),
                                   std::pair(208, 2), std::pair(256, 12)}) {
      const std::string what = std::string(DTypeName(dtype)) + " d " + std::to_string(d);
      const ModelSpec spec = SpecOf(2, group, d, dtype);
      DeviceBench bench(GetParam(), spec);
      const Context context = reference::TraceContext(spec, 600, d);
      const Context stored = reference::Stored(context);
      // The stored rows are other ones: this test can fail.
      ASSERT_NE(stored.k, context.k);
      BenchSequence sequence(bench);
      int64_t from = 0;
      for (const int64_t n : {1, 2, 33, 128, 129, 600}) {
        ASSERT_TRUE(sequence.Append(context, from, n).ok());
        from = n;
        const std::vector<float> q = reference::GaussianQueries(spec, 1, n);
        ExpectDense(stored, sequence.Attend(All(), q), q, what + " n " + std::to_string(n));
      }
      const std::vector<float> chunk = reference::GaussianQueries(spec, 40, 6);
      ExpectDense(stored, sequence.Attend(All(), chunk), chunk, what + " chunk");
    }
  }
}

TEST_P(Int8Rows, SparseAttends) {
  for (const auto& [d, group, dtype] :
       {std::tuple(64, 3, DType::kBF16), std::tuple(128, 4, DType::kBF16),
        std::tuple(128, 2, DType::kF32), std::tuple(80, 16, DType::kF16),
        std::tuple(256, 2, DType::kBF16)}) {
    const std::string what = std::string(DTypeName(dtype)) + " d " + std::to_string(d);
    const ModelSpec spec = SpecOf(2, group, d, dtype);
    DeviceBench bench(GetParam(), spec);
    const Context context = reference::TraceContext(spec, 4200, 11);
    const Context stored = reference::Stored(context);
    const std::vector<float> q = reference::TraceQueries(context, 2, 12, 1.5);
    BenchSequence sequence(bench);
    ASSERT_TRUE(sequence.Append(context, 0, context.n).ok());
    for (const Selector selector : {Selector::kAsymmetric, Selector::kOracle}) {
      Policy policy = DefaultPolicy(spec);
      policy.selector = selector;
      policy.seed = 17;
      const auto expect = [&](const Policy& of, bool promises, const std::string& name) {
        ExpectWeighted(stored, q, of, promises, sequence.Attend(of, q), sequence.Select(of, q),
                       what + " " + name);
      };
      expect(policy, true, "stratified");
      Policy mass = policy;
      mass.heavy_kind = HeavyKind::kMass;
      mass.heavy_mass = 0.5;
      expect(mass, true, "top-p");
      Policy many = policy;
      many.heavy_kind = HeavyKind::kCount;
      many.heavy_count = 3500;
      expect(many, true, "many rows");
      Policy uniform = policy;
      uniform.tail = Tail::kUniform;
      uniform.bound = Bound::kPaper;
      expect(uniform, true, "uniform");
    }
  }
}

// A decode step gives what an append and an attend give.
TEST_P(Int8Rows, DecodeSteps) {
  ExpectStepsAppendAndAttend(GetParam(), SpecOf(2, 4, 128, DType::kBF16));
}

// Appends in any chunks, forks and truncation give the same bits.
TEST_P(Int8Rows, DoNotDependOnHowRowsCame) {
  const ModelSpec spec = SpecOf(2, 2, 64, DType::kBF16);
  DeviceBench bench(GetParam(), spec);
  const Context context = reference::TraceContext(spec, 6000, 71);
  const std::vector<float> q = reference::TraceQueries(context, 1, 72, 1.5);
  const Policy policy = DefaultPolicy(spec);
  BenchSequence whole(bench), chunks(bench);
  ASSERT_TRUE(whole.Append(context, 0, 6000).ok());
  const std::vector<float> at_once = whole.Attend(policy, q).result.out;
  ASSERT_TRUE(chunks.Append(context, 0, 6000, 777).ok());
  EXPECT_EQ(chunks.Attend(policy, q).result.out, at_once);
  BenchSequence fork = chunks.Fork(5000);
  ASSERT_TRUE(fork.Append(context, 5000, 6000, 1).ok());
  EXPECT_EQ(fork.Attend(policy, q).result.out, at_once);
  chunks.Truncate(2000);
  ASSERT_TRUE(chunks.Append(context, 2000, 6000).ok());
  EXPECT_EQ(chunks.Attend(policy, q).result.out, at_once);
}

INSTANTIATE_TEST_SUITE_P(Devices, Int8Rows, ::testing::ValuesIn(DeviceFactories()),
                         [](const auto& info) { return info.param.name; });

}  // namespace
}  // namespace spillway
