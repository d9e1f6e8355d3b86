// The index of a device does not depend on how the keys were appended. This is tested through
// Select, whose sets depend on the codes.
#include <gtest/gtest.h>

#include <cmath>
#include <string>
#include <vector>

#include "tests/conformance/device_bench.h"

namespace spillway {
namespace {

using reference::Context;

class Index : public ::testing::TestWithParam<std::tuple<DeviceFactory, int>> {
 protected:
  Index()
      : spec_(WithBand(
            MakeSpec(2, 2, 64, DType::kBF16,
                     {.kind = HashKind::kRotation, .bits_per_dim = std::get<1>(GetParam())}))),
        bench_(std::get<0>(GetParam()), spec_),
        context_(reference::TraceContext(spec_, 3000, 51)),
        other_(reference::TraceContext(spec_, 3000, 52)),
        q_(reference::TraceQueries(context_, 1, 53, 1.5)) {}

  // The largest resident sample, for devices that keep its rows in their memory.
  static ModelSpec WithBand(ModelSpec spec) {
    spec.resident_sample_fraction = kResidentSampleFractionMax;
    return spec;
  }

  // Large heavy sets depend on most of the information in the codes. Equal outputs then show that
  // the rows which a device keeps are the right rows.
  void ExpectSameCodes(BenchSequence& a, BenchSequence& b, const std::string& what) {
    ASSERT_EQ(a.token_count(), b.token_count()) << what;
    for (const int64_t heavy : {64, 500, 1100}) {
      Policy policy = DefaultPolicy(spec_);
      policy.dense_token_count = 1024;
      policy.heavy_kind = HeavyKind::kCount;
      policy.heavy_count = heavy;
      const JobItem x = a.Select(policy, q_), y = b.Select(policy, q_);
      ASSERT_TRUE(x.status.ok()) << x.status;
      ASSERT_TRUE(y.status.ok()) << y.status;
      for (int h = 0; h < spec_.kv_head_count; ++h) {
        const Selection &s = x.result.selections[h], &t = y.result.selections[h];
        EXPECT_LT(s.indices.size(), static_cast<size_t>(a.token_count()));
        EXPECT_EQ(s.indices, t.indices) << what << " heavy " << heavy;
        EXPECT_EQ(s.strata, t.strata) << what << " heavy " << heavy;
        EXPECT_EQ(s.log_weights, t.log_weights) << what << " heavy " << heavy;
      }
      EXPECT_EQ(a.Attend(policy, q_).result.out, b.Attend(policy, q_).result.out) << what;
      // A query that does not see the newest tokens; then a sample outside the resident sample.
      const std::vector<int64_t> visible = {a.token_count() - 150};
      EXPECT_EQ(a.Attend(policy, q_, visible).result.out, b.Attend(policy, q_, visible).result.out)
          << what;
      policy.seed = spec_.resident_sample_seed + 1;
      EXPECT_EQ(a.Attend(policy, q_).result.out, b.Attend(policy, q_).result.out) << what;
    }
  }

  const ModelSpec spec_;
  DeviceBench bench_;
  const Context context_;
  const Context other_;
  const std::vector<float> q_;
};

TEST_P(Index, AppendInPiecesOfAnySize) {
  for (const int64_t n : {1900, 3000}) {
    BenchSequence whole(bench_);
    ASSERT_TRUE(whole.Append(context_, 0, n).ok());
    for (const int64_t chunk : {1, 3, 5, 17, 127, 129, 1000}) {
      BenchSequence pieces(bench_);
      ASSERT_TRUE(pieces.Append(context_, 0, n, chunk).ok());
      ExpectSameCodes(whole, pieces, "chunk " + std::to_string(chunk));
    }
    // Up to the length from which codes exist, then token by token.
    BenchSequence steps(bench_);
    ASSERT_TRUE(steps.Append(context_, 0, 1023).ok());
    ASSERT_TRUE(steps.Append(context_, 1023, 1030, 1).ok());
    ASSERT_TRUE(steps.Append(context_, 1030, n, 1).ok());
    ExpectSameCodes(whole, steps, "token by token");
  }
}

TEST_P(Index, TruncateAndAppendAgain) {
  BenchSequence whole(bench_);
  ASSERT_TRUE(whole.Append(context_, 0, 2600).ok());
  for (const int64_t cut : {0, 1, 500, 1023, 1024, 1025, 1151, 1152, 2000, 2599, 2600}) {
    BenchSequence sequence(bench_);
    // Other tokens are appended after the cut, so that stale codes or a stale centre would show.
    ASSERT_TRUE(sequence.Append(context_, 0, cut).ok());
    ASSERT_TRUE(sequence.Append(other_, cut, 3000).ok());
    sequence.Truncate(cut);
    if (cut < 1024) {
      EXPECT_EQ(sequence.index_bytes(), 0) << "cut " << cut;
    }
    EXPECT_EQ(sequence.token_count(), cut);
    ASSERT_TRUE(sequence.Append(context_, cut, 2600).ok());
    ExpectSameCodes(whole, sequence, "cut " + std::to_string(cut));
  }
}

TEST_P(Index, ForksAreIndependent) {
  for (const int64_t at : {700, 1023, 1024, 1100, 1280, 2000}) {
    BenchSequence parent(bench_);
    ASSERT_TRUE(parent.Append(context_, 0, 2000).ok());
    BenchSequence fork = parent.Fork(at);
    EXPECT_EQ(fork.token_count(), at);
    ASSERT_TRUE(fork.Append(other_, at, 2500, 77).ok());
    ASSERT_TRUE(parent.Append(context_, 2000, 2500, 77).ok());
    BenchSequence plain(bench_), mixed(bench_);
    ASSERT_TRUE(plain.Append(context_, 0, 2500).ok());
    ASSERT_TRUE(mixed.Append(context_, 0, at).ok());
    ASSERT_TRUE(mixed.Append(other_, at, 2500).ok());
    ExpectSameCodes(parent, plain, "parent, fork at " + std::to_string(at));
    ExpectSameCodes(fork, mixed, "fork at " + std::to_string(at));
    parent.Truncate(at);
    ExpectSameCodes(fork, mixed, "fork after its parent's cut at " + std::to_string(at));
  }
}

TEST_P(Index, BytesPerTokenAreWithinTheBound) {
  const int bits = spec_.hash.bits_per_dim;
  for (const int d : {64, 96, 128, 256}) {
    const ModelSpec spec =
        MakeSpec(4, 2, d, DType::kBF16, {.kind = HashKind::kRotation, .bits_per_dim = bits});
    // Bit planes, a factor of 2 bytes, a norm, the token's shares of its page's centre (rounded up)
    // and of the resident sample's rows.
    const int64_t codes = bits * d / 8 + 2 + 1 + 2 * d / 128;
    const auto resident = static_cast<int64_t>(
        std::ceil(spec.resident_sample_fraction * static_cast<double>(spec.row_bytes())));
    EXPECT_LE(bench_.device().IndexBytesPerToken(spec), 4 * (codes + 1 + resident));
    EXPECT_GE(bench_.device().IndexBytesPerToken(spec), 4 * codes);
  }
  BenchSequence sequence(bench_);
  ASSERT_TRUE(sequence.Append(context_, 0, 2944).ok());  // 23 whole pages
  const int64_t codes = 2944 * spec_.kv_head_count * bits * spec_.head_dim / 8;
  EXPECT_GE(sequence.index_bytes(), codes);
  // Rows that a device keeps at any length: the sink, the newest rows, and pages that are not full.
  const int64_t kept = spec_.kv_head_count * 320 * spec_.row_bytes();
  EXPECT_LE(sequence.index_bytes(), 2944 * bench_.device().IndexBytesPerToken(spec_) + kept);
}

INSTANTIATE_TEST_SUITE_P(Devices, Index,
                         ::testing::Combine(::testing::ValuesIn(DeviceFactories()),
                                            ::testing::Values(1, 2, 4)),
                         [](const auto& info) {
                           return std::get<0>(info.param).name + "_bits" +
                                  std::to_string(std::get<1>(info.param));
                         });

}  // namespace
}  // namespace spillway
