// The tail of LSH sampling is the sample of MagicPIG, with its weights.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <memory>
#include <string>
#include <vector>

#include "host/methods/lsh_sampling/projections.h"
#include "tests/conformance/method_models.h"
#include "tests/conformance/scored_end.h"
#include "tests/reference/codes.h"
#include "tests/reference/methods.h"

namespace spillway {
namespace {

using reference::BinRange;
using reference::Context;

// A projection closer to zero than this, relative to the vector's length, may have either sign.
constexpr double kProjectionTolerance = 2e-6;

// The tokens that the reference samples from one KV head's tail, for any query.
class LshReference {
 public:
  LshReference(const Context& context, int kv_head)
      : spec_(context.spec),
        kv_(context.Head(kv_head)),
        centre_(reference::KeyCentre(kv_)),
        projections_(MakeProjections(spec_, 0)) {
    for (int64_t t = 0; t < kv_.n; ++t) {
      keys_.push_back(Centred(t));
      projected_.push_back(reference::Projected(keys_.back(), projections_));
    }
  }

  const reference::KeyValues& kv() const { return kv_; }
  // Tokens of `candidates` that share two buckets with q. fp32 must not decide otherwise for any.
  std::vector<uint32_t> Sample(const std::vector<double>& q,
                               const std::vector<uint32_t>& candidates) const {
    const std::vector<double> projected = reference::Projected(q, projections_);
    std::vector<uint32_t> taken;
    for (const uint32_t t : candidates) {
      const BinRange shared = reference::SharedBuckets(
          projected_[t], kProjectionTolerance * reference::Norm(keys_[t]), projected,
          kProjectionTolerance * reference::Norm(q), spec_.indices.lsh_bits);
      EXPECT_EQ(shared.low >= 2, shared.high >= 2)
          << "token " << t << " is undecided: choose another seed";
      if (shared.low >= 2) taken.push_back(t);
    }
    return taken;
  }
  std::vector<double> Probabilities(const std::vector<double>& q,
                                    const std::vector<uint32_t>& tokens) const {
    std::vector<double> probabilities;
    for (const uint32_t t : tokens) {
      const double cosine =
          reference::Dot(q, keys_[t]) / (reference::Norm(q) * reference::Norm(keys_[t]));
      probabilities.push_back(reference::TwoHitProbability(cosine, spec_.indices.lsh_bits,
                                                           spec_.indices.lsh_table_count));
    }
    return probabilities;
  }

 private:
  std::vector<double> Centred(int64_t t) const {
    std::vector<double> x(kv_.Key(t).begin(), kv_.Key(t).end());
    for (int i = 0; i < kv_.d; ++i) x[i] -= centre_[i];
    return x;
  }

  const ModelSpec spec_;
  const reference::KeyValues kv_;
  const std::vector<double> centre_;
  const std::vector<float> projections_;
  std::vector<std::vector<double>> keys_;       // minus the centre
  std::vector<std::vector<double>> projected_;  // projections of these
};

struct Case {
  int group, d;
  DType dtype;
  int tables, bits;
  int64_t tokens;
};

class LshSampling : public ::testing::TestWithParam<DeviceFactory> {
 protected:
  void Prepare(const Case& c) {
    sequence_.reset();
    const IndexedModel model(2, c.group, c.d, c.dtype,
                             {.int4_keys = true,
                              .label_channel_count = 8,
                              .lsh_table_count = c.tables,
                              .lsh_bits = c.bits,
                              .lsh_seed = 3});
    spec_ = model.spec;
    bench_ = std::make_unique<DeviceBench>(GetParam(), spec_, 0, model.file);
    context_ = reference::TraceContext(spec_, c.tokens, 81);
    q_ = reference::TraceQueries(context_, 2, 82, 1.5);
    sequence_ = std::make_unique<BenchSequence>(*bench_);
    ASSERT_TRUE(sequence_->Append(context_, 0, c.tokens).ok());
    references_.clear();
    for (int h = 0; h < spec_.kv_head_count; ++h) references_.emplace_back(context_, h);
    policy_ = DefaultPolicy(spec_);
    policy_.dense_token_count = 1024;
    policy_.sink_token_count = 4;
    policy_.tail = Tail::kLshSampling;
    policy_.heavy_kind = HeavyKind::kCount;
  }

  // Checks an attend of both queries, which do not see the newest `hidden` tokens. Returns the
  // number of sampled rows.
  int64_t ExpectSampled(const std::string& what, int64_t hidden = 0) {
    EXPECT_TRUE(Validate(policy_, spec_).empty()) << what;
    const std::vector<int64_t> visible = {context_.n - 1 - hidden, context_.n - hidden};
    const JobItem attend = sequence_->Attend(policy_, q_, visible);
    Policy exact = policy_;
    exact.tail = Tail::kNone;
    const JobItem chosen = sequence_->Select(exact, q_, visible);
    EXPECT_TRUE(attend.status.ok() && chosen.status.ok()) << attend.status << chosen.status;
    if (!attend.status.ok() || !chosen.status.ok()) return 0;
    int64_t sampled = 0;
    for (int64_t t = 0; t < 2; ++t) {
      for (int h = 0; h < spec_.kv_head_count; ++h) {
        sampled += ExpectGroup(attend.result, t, h, visible[t],
                               chosen.result.selections[t * spec_.kv_head_count + h].indices,
                               what + " query " + std::to_string(t));
      }
    }
    return sampled;
  }

  // Checks one query of one KV head. exact: its rows of weight 1.
  int64_t ExpectGroup(const AttendResult& result, int64_t query, int kv_head, int64_t visible,
                      const std::vector<uint32_t>& exact, const std::string& what) {
    const LshReference& reference = references_[kv_head];
    std::vector<uint32_t> tail;
    for (int64_t t = 0; t < visible; ++t) {
      if (!std::binary_search(exact.begin(), exact.end(), static_cast<uint32_t>(t))) {
        tail.push_back(static_cast<uint32_t>(t));
      }
    }
    std::vector<uint32_t> taken_by_any;
    for (int g = 0; g < spec_.group(); ++g) {
      const int head = kv_head * spec_.group() + g;
      const std::vector<double> q = reference::Query(spec_, q_, query, head);
      const std::vector<uint32_t> sampled = reference.Sample(q, tail);
      const reference::SampledAttention wanted =
          reference::AttendSampled(reference.kv(), q, spec_.softmax_scale, exact, sampled,
                                   reference.Probabilities(q, sampled));
      EXPECT_LT(
          reference::RelativeDistance(OutputOf(spec_, result, query, head), wanted.attention.out),
          2e-5)
          << what << " head " << head;
      const int64_t at = query * spec_.query_head_count + head;
      EXPECT_NEAR(result.lse[at], wanted.attention.lse, 5e-5) << what;
      const Certificate& c = result.certificates[at];
      EXPECT_EQ(c.promise, Promise::kNone) << what;
      EXPECT_EQ(c.relative_error, std::numeric_limits<float>::infinity()) << what;
      EXPECT_NEAR(c.tail_mass, wanted.tail_mass, 2e-5) << what;
      EXPECT_EQ(c.visible_token_count, visible);
      EXPECT_EQ(c.heavy_token_count, static_cast<int64_t>(exact.size()) - policy_.sink_token_count -
                                         (visible - ScoredEnd(spec_, policy_, visible)));
      taken_by_any.insert(taken_by_any.end(), sampled.begin(), sampled.end());
    }
    // A row is read once for all heads of the group.
    std::sort(taken_by_any.begin(), taken_by_any.end());
    taken_by_any.erase(std::unique(taken_by_any.begin(), taken_by_any.end()), taken_by_any.end());
    const auto count = static_cast<int64_t>(taken_by_any.size());
    for (int g = 0; g < spec_.group(); ++g) {
      const int64_t at = query * spec_.query_head_count + kv_head * spec_.group() + g;
      EXPECT_EQ(result.certificates[at].sampled_token_count, count) << what;
    }
    EXPECT_EQ(result.touched_row_counts[query * spec_.kv_head_count + kv_head],
              static_cast<int64_t>(exact.size()) + count)
        << what;
    return count;
  }

  ModelSpec spec_;
  std::unique_ptr<DeviceBench> bench_;
  Context context_;
  std::vector<float> q_;
  std::unique_ptr<BenchSequence> sequence_;
  std::vector<LshReference> references_;
  Policy policy_;
};

TEST_P(LshSampling, WeighsWhatSharesTwoBuckets) {
  for (const Case& c :
       {Case{1, 64, DType::kF32, 75, 8, 2600}, Case{3, 64, DType::kBF16, 40, 6, 2500},
        Case{2, 128, DType::kF16, 150, 10, 1500}, Case{4, 80, DType::kBF16, 30, 1, 1400},
        Case{2, 64, DType::kBF16, 128, 16, 1500}}) {
    Prepare(c);
    const std::string name =
        "L " + std::to_string(c.tables) + " K " + std::to_string(c.bits) + " heavy ";
    for (const int64_t heavy : {0, 100}) {
      policy_.heavy_count = heavy;
      const int64_t sampled = ExpectSampled(name + std::to_string(heavy));
      const int64_t all = 4 * (c.tokens - 68 - heavy);
      EXPECT_LT(sampled, all + 1) << name;
      // With one bit per table, all tokens share buckets; with sixteen, few do.
      if (c.bits > 1) {
        EXPECT_LT(sampled, all * 9 / 10) << name;
      }
      if (c.bits < 16) {
        EXPECT_GT(sampled, all / 1000) << name;
      }
    }
  }
}

TEST_P(LshSampling, AfterAnySelectionAndFromBeforeTheNewestTokens) {
  Prepare({2, 64, DType::kBF16, 40, 6, 2500});
  ExpectSampled("asymmetric", 700);
  policy_.selector = Selector::kHamming;
  ExpectSampled("hamming");
  policy_.selector = Selector::kInt4Keys;
  policy_.candidate_selector = Selector::kDoubleSparsity;
  policy_.heavy_kind = HeavyKind::kMass;
  policy_.heavy_mass = 0.4;
  ExpectSampled("top-p of two stages", 3);
  policy_.selector = Selector::kOracle;
  policy_.candidate_selector.reset();
  policy_.heavy_kind = HeavyKind::kFraction;
  policy_.heavy_fraction = 0.5;
  ExpectSampled("oracle");
}

// With one table, no token shares two buckets.
TEST_P(LshSampling, OneTableSamplesNothing) {
  Prepare({2, 64, DType::kF32, 1, 2, 1500});
  EXPECT_EQ(ExpectSampled("one table"), 0);
  EXPECT_EQ(sequence_->Attend(policy_, q_).result.certificates[0].tail_mass, 0);
}

TEST_P(LshSampling, IsExactWhereAttendsAreDense) {
  Prepare({2, 64, DType::kF32, 40, 6, 1500});
  policy_.dense_token_count = 2048;
  const JobItem item = sequence_->Attend(policy_, q_);
  ASSERT_TRUE(item.status.ok()) << item.status;
  for (const Certificate& c : item.result.certificates) EXPECT_EQ(c.promise, Promise::kExact);
}

// Keys at the centre, and queries of length 0, have no angle. The results must still be finite.
TEST_P(LshSampling, VectorsOfNoLengthAreFinite) {
  Prepare({1, 64, DType::kF32, 40, 6, 1500});
  Context same = context_;
  for (int64_t i = 0; i < static_cast<int64_t>(same.k.size()); ++i) same.k[i] = 0.5f;
  BenchSequence sequence(*bench_);
  ASSERT_TRUE(sequence.Append(same, 0, same.n).ok());
  for (const float scale : {0.0f, 1.0f}) {
    std::vector<float> q = q_;
    for (float& x : q) x *= scale;
    for (BenchSequence* s : {&sequence, sequence_.get()}) {
      const JobItem item = s->Attend(policy_, q);
      ASSERT_TRUE(item.status.ok()) << item.status;
      for (const float x : item.result.out) ASSERT_TRUE(std::isfinite(x));
      for (const float x : item.result.lse) ASSERT_TRUE(std::isfinite(x));
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Devices, LshSampling, ::testing::ValuesIn(DeviceFactories()),
                         [](const auto& info) { return info.param.name; });

}  // namespace
}  // namespace spillway
