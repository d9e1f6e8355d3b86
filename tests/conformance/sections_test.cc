// The indices beside the codes do not depend on how the keys were appended. This is tested with
// every selector of a model with all indices, and with LSH sampling.
#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "tests/conformance/method_models.h"

namespace spillway {
namespace {

using reference::Context;

constexpr Selector kSelectors[] = {Selector::kInt4Keys, Selector::kQuest, Selector::kDoubleSparsity,
                                   Selector::kAsymmetric, Selector::kHamming};

// The parameter is the number of tokens per page of bounds.
class Sections : public ::testing::TestWithParam<std::tuple<DeviceFactory, int>> {
 protected:
  Sections()
      : model_(2, 2, 64, DType::kBF16, EveryIndex(std::get<1>(GetParam()))),
        spec_(model_.spec),
        bench_(std::get<0>(GetParam()), spec_, 0, model_.file),
        context_(reference::TraceContext(spec_, 2700, 51)),
        other_(reference::TraceContext(spec_, 2700, 52)),
        q_(reference::TraceQueries(context_, 1, 53, 1.5)) {}

  BenchSequence Whole(const Context& context, int64_t token_count) {
    BenchSequence sequence(bench_);
    EXPECT_TRUE(sequence.Append(context, 0, token_count).ok());
    return sequence;
  }

  void ExpectSameAttend(BenchSequence& a, BenchSequence& b, const Policy& policy,
                        const std::string& what) {
    const JobItem x = a.Attend(policy, q_), y = b.Attend(policy, q_);
    ASSERT_TRUE(x.status.ok() && y.status.ok()) << what << x.status << y.status;
    EXPECT_EQ(x.result.out, y.result.out) << what;
    EXPECT_EQ(x.result.lse, y.result.lse) << what;
    EXPECT_EQ(x.result.touched_row_counts, y.result.touched_row_counts) << what;
  }

  // Compares large and small heavy sets, and the strata of all tokens.
  void ExpectSameBy(Selector selector, BenchSequence& a, BenchSequence& b,
                    const std::string& what) {
    Policy policy = DefaultPolicy(spec_);
    policy.dense_token_count = 1024;
    policy.selector = selector;
    policy.heavy_kind = HeavyKind::kCount;
    for (const int64_t heavy : {64, 500}) {
      policy.heavy_count = heavy;
      const JobItem x = a.Select(policy, q_), y = b.Select(policy, q_);
      ASSERT_TRUE(x.status.ok() && y.status.ok()) << what << x.status << y.status;
      for (int h = 0; h < spec_.kv_head_count; ++h) {
        const Selection &s = x.result.selections[h], &t = y.result.selections[h];
        EXPECT_LT(s.indices.size(), static_cast<size_t>(a.token_count()));
        EXPECT_EQ(s.indices, t.indices) << what << " heavy " << heavy;
        EXPECT_EQ(s.strata, t.strata) << what << " heavy " << heavy;
        EXPECT_EQ(s.log_weights, t.log_weights) << what << " heavy " << heavy;
      }
    }
    ExpectSameAttend(a, b, policy, what);
  }

  void ExpectSame(BenchSequence& a, BenchSequence& b, const std::string& what) {
    ASSERT_EQ(a.token_count(), b.token_count()) << what;
    for (const Selector selector : kSelectors) {
      ExpectSameBy(selector, a, b,
                   what + ", selector " + std::to_string(static_cast<int>(selector)));
    }
    Policy policy = DefaultPolicy(spec_);
    policy.dense_token_count = 1024;
    policy.tail = Tail::kLshSampling;
    policy.heavy_kind = HeavyKind::kCount;
    policy.heavy_count = 0;
    ExpectSameAttend(a, b, policy, what + ", LSH sampling");
  }

  const IndexedModel model_;
  const ModelSpec& spec_;
  DeviceBench bench_;
  const Context context_;
  const Context other_;
  const std::vector<float> q_;
};

TEST_P(Sections, AppendInPiecesOfAnySize) {
  constexpr int64_t kTokens = 1900;
  BenchSequence whole = Whole(context_, kTokens);
  for (const int64_t chunk : {3, 17, 64, 127, 129, 1000}) {
    BenchSequence pieces(bench_);
    ASSERT_TRUE(pieces.Append(context_, 0, kTokens, chunk).ok());
    ExpectSame(whole, pieces, "chunk " + std::to_string(chunk));
  }
  // Up to the length from which indices exist, then token by token.
  BenchSequence steps(bench_);
  ASSERT_TRUE(steps.Append(context_, 0, 1020).ok());
  ASSERT_TRUE(steps.Append(context_, 1020, kTokens, 1).ok());
  ExpectSame(whole, steps, "token by token");
}

TEST_P(Sections, TruncateAndAppendAgain) {
  BenchSequence whole = Whole(context_, 2200);
  for (const int64_t cut : {0, 500, 1023, 1024, 1025, 1151, 1152, 1160, 1700, 2199, 2200}) {
    const std::string what = "cut " + std::to_string(cut);
    // Other tokens are appended after the cut, so that stale data would show.
    BenchSequence sequence(bench_);
    ASSERT_TRUE(sequence.Append(context_, 0, cut).ok());
    ASSERT_TRUE(sequence.Append(other_, cut, 2600).ok());
    sequence.Truncate(cut);
    if (cut < 1024) {
      EXPECT_EQ(sequence.index_bytes(), 0) << what;
    }
    ASSERT_TRUE(sequence.Append(context_, cut, 2200).ok());
    ExpectSame(whole, sequence, what);
  }
}

// After a cut within a page, its bounds may still include the removed tokens. Everything else is as
// if these had never been appended, and after the next append the bounds are too.
TEST_P(Sections, TruncateAlone) {
  const int64_t page = spec_.indices.quest_page_token_count;
  for (const int64_t cut : {1500 / page * page, 1500 / page * page + page / 2 + 1}) {
    const std::string what = "cut " + std::to_string(cut);
    BenchSequence fresh = Whole(context_, cut);
    BenchSequence sequence = Whole(context_, cut);
    ASSERT_TRUE(sequence.Append(other_, cut, 2000).ok());
    sequence.Truncate(cut);
    if (cut % page == 0) {
      ExpectSame(fresh, sequence, what);
    } else {
      for (const Selector selector : kSelectors) {
        if (selector != Selector::kQuest) ExpectSameBy(selector, fresh, sequence, what);
      }
      Policy policy = DefaultPolicy(spec_);
      policy.dense_token_count = 1024;
      policy.selector = Selector::kQuest;
      const JobItem item = sequence.Select(policy, q_);
      ASSERT_TRUE(item.status.ok()) << item.status;
      for (const Selection& s : item.result.selections) EXPECT_LT(s.indices.back(), cut);
    }
    ASSERT_TRUE(fresh.Append(context_, cut, cut + 1).ok());
    ASSERT_TRUE(sequence.Append(context_, cut, cut + 1).ok());
    ExpectSame(fresh, sequence, what + " and a token more");
  }
}

TEST_P(Sections, ForksAreIndependent) {
  for (const int64_t at : {700, 1023, 1024, 1100, 1291}) {
    const std::string what = "fork at " + std::to_string(at);
    BenchSequence parent = Whole(context_, 1500);
    BenchSequence fork = parent.Fork(at);
    ASSERT_TRUE(fork.Append(other_, at, 1800, 77).ok());
    ASSERT_TRUE(parent.Append(context_, 1500, 1800, 77).ok());
    BenchSequence plain = Whole(context_, 1800);
    BenchSequence mixed(bench_);
    ASSERT_TRUE(mixed.Append(context_, 0, at).ok());
    ASSERT_TRUE(mixed.Append(other_, at, 1800).ok());
    ExpectSame(parent, plain, what + ", its parent");
    ExpectSame(fork, mixed, what);
    parent.Truncate(at);
    ExpectSame(fork, mixed, what + " after its parent's cut");
  }
}

// Int4: 4 bits per element and a range. Quest: two vectors per page. LSH: 2 bytes per table.
TEST_P(Sections, BytesPerTokenAreWhatTheIndicesTake) {
  const ModelSpec bare = MakeSpec(2, 2, 64, DType::kBF16);
  const auto bytes = [&](const KeyIndexSpec& indices) {
    ModelSpec spec = bare;
    spec.indices = indices;
    const int64_t without = bench_.device().IndexBytesPerToken(bare);
    return bench_.device().IndexBytesPerToken(spec) - without;
  };
  const int page = std::get<1>(GetParam());
  const auto near = [](int64_t got, int64_t wanted) {
    EXPECT_GE(got, 2 * wanted - 2) << wanted;
    EXPECT_LE(got, 2 * wanted + 2) << wanted;
  };
  near(bytes({.int4_keys = true}), 64 / 2 + 4);
  near(bytes({.label_channel_count = 16}), 16 / 2 + 4);
  near(bytes({.quest_page_token_count = page}), 2 * 64 * 2 / page);
  near(bytes({.lsh_table_count = 75, .lsh_bits = 8}), 75 * 2);
}

INSTANTIATE_TEST_SUITE_P(Devices, Sections,
                         ::testing::Combine(::testing::ValuesIn(DeviceFactories()),
                                            ::testing::Values(16, 32, 64, 128)),
                         [](const auto& info) {
                           return std::get<0>(info.param).name + "_page" +
                                  std::to_string(std::get<1>(info.param));
                         });

}  // namespace
}  // namespace spillway
