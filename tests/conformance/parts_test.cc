// Parts of a model, by KV heads and by layers, give the results of the whole model, bit for bit.
#include <gtest/gtest.h>

#include <algorithm>
#include <span>
#include <vector>

#include "tests/conformance/device_bench.h"
#include "tests/reference/trace.h"

namespace spillway {
namespace {

using reference::Context;

struct Part {
  int first_layer;
  int first_kv_head;
  int kv_head_count;
};

class Parts : public ::testing::TestWithParam<DeviceFactory> {
 protected:
  static constexpr int64_t kTokens = 12000;
  static constexpr int64_t kQueries = 2;
  static constexpr int kLayers = 3;
  static constexpr int kKvHeads = 3;
  static constexpr int kGroup = 2;
  static constexpr int kDim = 64;

  Parts() : spec_(MakeSpec(kKvHeads, kGroup, kDim, DType::kBF16)) {
    spec_.layer_count = kLayers;
    context_ = reference::TraceContext(spec_, kTokens, 7);
    q_ = reference::TraceQueries(context_, kQueries, 9, 1.5);
  }

  // The result of a model with only the part's layers and heads. layer: of the whole model.
  AttendResult Ask(const Part& part, int layer, bool select) {
    ModelSpec spec = spec_;
    spec.layer_count = kLayers - part.first_layer;
    spec.kv_head_count = part.kv_head_count;
    spec.query_head_count = part.kv_head_count * kGroup;
    spec.first_layer = part.first_layer;
    spec.first_kv_head = part.first_kv_head;
    const int64_t head = kTokens * kDim;
    const auto slice = [&](const std::vector<float>& rows) {
      const auto begin = rows.begin() + part.first_kv_head * head;
      return std::vector<float>(begin, begin + part.kv_head_count * head);
    };
    const Context context{spec, kTokens, slice(context_.k), slice(context_.v)};
    std::vector<float> q;
    for (int64_t t = 0; t < kQueries; ++t) {
      const auto begin = q_.begin() + (t * kKvHeads + part.first_kv_head) * kGroup * kDim;
      q.insert(q.end(), begin, begin + part.kv_head_count * kGroup * kDim);
    }
    DeviceBench bench(GetParam(), spec);
    BenchSequence sequence(bench);
    const int local = layer - part.first_layer;
    EXPECT_TRUE(sequence.Append(context, 0, kTokens, 0, local).ok());
    const Policy policy = DefaultPolicy(spec);
    JobItem item =
        select ? sequence.Select(policy, q, {}, local) : sequence.Attend(policy, q, {}, local);
    EXPECT_TRUE(item.status.ok()) << item.status;
    return std::move(item.result);
  }

  ModelSpec spec_;
  Context context_;
  std::vector<float> q_;
};

// Columns [begin, end) of rows of `width` elements.
template <typename T>
std::vector<T> Slice(const std::vector<T>& whole, int64_t width, int64_t begin, int64_t end) {
  std::vector<T> slice;
  for (auto row = whole.begin(); row != whole.end(); row += width) {
    slice.insert(slice.end(), row + begin, row + end);
  }
  return slice;
}

void ExpectSame(const Certificate& a, const Certificate& b) {
  EXPECT_EQ(a.visible_token_count, b.visible_token_count);
  EXPECT_EQ(a.heavy_token_count, b.heavy_token_count);
  EXPECT_EQ(a.sampled_token_count, b.sampled_token_count);
  EXPECT_EQ(a.relative_error, b.relative_error);
  EXPECT_EQ(a.tail_mass, b.tail_mass);
  EXPECT_EQ(a.promise, b.promise);
}

TEST_P(Parts, AnswerAsTheWhole) {
  for (const int layer : {0, 2}) {
    const AttendResult whole = Ask({0, 0, kKvHeads}, layer, false);
    // Something must be sampled, otherwise the comparison below says little.
    EXPECT_TRUE(std::any_of(whole.certificates.begin(), whole.certificates.end(),
                            [](const Certificate& c) { return c.sampled_token_count > 0; }));
    for (const Part part : {Part{0, 0, 1}, Part{0, 1, 2}, Part{layer, 2, 1}}) {
      SCOPED_TRACE(::testing::Message() << "layer " << layer << ", layers from " << part.first_layer
                                        << ", heads from " << part.first_kv_head);
      const AttendResult result = Ask(part, layer, false);
      const int64_t begin = int64_t{part.first_kv_head} * kGroup;
      const int64_t end = begin + part.kv_head_count * kGroup;
      constexpr int64_t kHeads = kKvHeads * kGroup;
      EXPECT_EQ(result.out, Slice(whole.out, kHeads * kDim, begin * kDim, end * kDim));
      EXPECT_EQ(result.lse, Slice(whole.lse, kHeads, begin, end));
      EXPECT_EQ(result.touched_row_counts,
                Slice(whole.touched_row_counts, kKvHeads, begin / kGroup, end / kGroup));
      const std::vector<Certificate> expected = Slice(whole.certificates, kHeads, begin, end);
      ASSERT_EQ(result.certificates.size(), expected.size());
      for (size_t i = 0; i < expected.size(); ++i) ExpectSame(result.certificates[i], expected[i]);
    }
  }
}

// A head's rows are added up in an order that does not depend on the number of heads.
TEST_P(Parts, AttendExactlyAsTheWhole) {
  constexpr int kHeads = 8;
  const auto ask = [&](const Context& context, const std::vector<float>& q) {
    DeviceBench bench(GetParam(), context.spec);
    BenchSequence sequence(bench);
    EXPECT_TRUE(sequence.Append(context, 0, kTokens).ok());
    Policy policy = DefaultPolicy(context.spec);
    policy.selector = Selector::kAll;
    JobItem item = sequence.Attend(policy, q);
    EXPECT_TRUE(item.status.ok()) << item.status;
    return std::move(item.result.out);
  };
  const Context whole =
      reference::TraceContext(MakeSpec(kHeads, 1, kDim, DType::kBF16), kTokens, 7);
  const std::vector<float> q = reference::TraceQueries(whole, 1, 9, 1.5);
  const std::vector<float> out = ask(whole, q);
  const auto of_head = [](const std::vector<float>& rows, int head, int64_t floats) {
    return std::vector<float>(rows.begin() + head * floats, rows.begin() + (head + 1) * floats);
  };
  for (const int head : {0, 5}) {
    ModelSpec spec = MakeSpec(1, 1, kDim, DType::kBF16);
    spec.first_kv_head = head;
    const Context part{spec, kTokens, of_head(whole.k, head, kTokens * kDim),
                       of_head(whole.v, head, kTokens * kDim)};
    EXPECT_EQ(ask(part, of_head(q, head, kDim)), of_head(out, head, kDim)) << "head " << head;
  }
}

TEST_P(Parts, SelectTheSetsOfTheWhole) {
  const AttendResult whole = Ask({0, 0, kKvHeads}, 1, true);
  const AttendResult part = Ask({1, 1, 2}, 1, true);
  const std::vector<Selection> expected = Slice(whole.selections, kKvHeads, 1, 3);
  ASSERT_EQ(part.selections.size(), expected.size());
  for (size_t i = 0; i < expected.size(); ++i) {
    EXPECT_EQ(part.selections[i].indices, expected[i].indices);
  }
}

// Without their place in the model, parts draw other rows. So the test above is able to fail.
TEST_P(Parts, AnswerDifferentlyWhereTheirPlaceIsNotSaid) {
  const AttendResult whole = Ask({0, 0, kKvHeads}, 1, false);
  ModelSpec lost = spec_;
  lost.kv_head_count = 1;
  lost.query_head_count = kGroup;
  const auto head = context_.k.begin() + kTokens * kDim;
  const auto values = context_.v.begin() + kTokens * kDim;
  const Context context{
      lost, kTokens, {head, head + kTokens * kDim}, {values, values + kTokens * kDim}};
  DeviceBench bench(GetParam(), lost);
  BenchSequence sequence(bench);
  EXPECT_TRUE(sequence.Append(context, 0, kTokens, 0, 1).ok());
  const JobItem item =
      sequence.Attend(DefaultPolicy(lost),
                      Slice(q_, kKvHeads * kGroup * kDim, kGroup * kDim, 2 * kGroup * kDim), {}, 1);
  EXPECT_NE(item.result.out,
            Slice(whole.out, kKvHeads * kGroup * kDim, kGroup * kDim, 2 * kGroup * kDim));
}

INSTANTIATE_TEST_SUITE_P(Devices, Parts, ::testing::ValuesIn(DeviceFactories()),
                         [](const auto& param) { return param.param.name; });

}  // namespace
}  // namespace spillway
