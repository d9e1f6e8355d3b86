// With value codes, the answer is that of the codes, corrected by the rows of the selection:
// compared with the definitions in fp64.
#include "tests/reference/value_codes.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <string>
#include <vector>

#include "host/codes/rotation.h"
#include "host/core/degrees.h"
#include "tests/conformance/expect_weighted.h"
#include "tests/conformance/heavy_fixture.h"
#include "tests/reference/codes.h"
#include "tests/reference/tail.h"

namespace spillway {
namespace {

// Codes and levels near a border may be rounded either way: a few of thousands. Each changes an
// answer by less than this.
constexpr double kTolerance = 3e-4;

ModelSpec SpecOf(int kv_heads, int group, int head_dim, DType dtype, int value_bits) {
  HashSpec hash;
  hash.value_bits = value_bits;
  return MakeSpec(kv_heads, group, head_dim, dtype, hash);
}

class ValueCodes : public HeavyTest {
 protected:
  // Estimated logits of query head g and the variances of their errors, by token.
  struct Estimated {
    std::vector<double> logits;
    std::vector<double> variances;
    double reference = 0;
  };
  Estimated EstimateLogits(int g) const {
    Estimated e;
    const reference::KeyValues kv = context_.Head(kv_head_);
    const std::vector<float> rotation = MakeRotation(spec_.head_dim, spec_.hash.seed, 0);
    const int bits = spec_.hash.bits_per_dim;
    const std::vector<double> q = QueryOf(kv_head_ * spec_.group() + g);
    const reference::QuantisedQuery query = reference::QuantiseQuery(q, rotation);
    for (int64_t t = 0; t < index().closed_token_count(); ++t) {
      const std::vector<reference::RotationCode> code = {
          reference::EncodeRotated(kv.Key(t), index().CentreOf(t), rotation, bits)};
      e.logits.push_back(reference::AsymmetricLogit(code[0], query, bits, spec_.softmax_scale) +
                         spec_.softmax_scale * reference::Dot(q, index().CentreOf(t)));
      e.variances.push_back(reference::RankVariance(code, std::vector<double>{e.logits.back()},
                                                    query, bits, spec_.softmax_scale));
    }
    const std::vector<double> centres = CentreLogits(Selector::kAsymmetric)[g];
    const std::vector<double> scores =
        reference::HeadScores(e.logits, begin(), end(), index().strays, centres);
    const auto largest = std::max_element(scores.begin(), scores.end());
    e.reference = e.logits[begin() + (largest - scores.begin())] - std::log(*largest);
    return e;
  }

  // Compares an attend of all heads of KV head kv_head_ with the definitions.
  void ExpectCorrected(const std::string& what) {
    const JobItem attend = sequence_->Attend(policy_, q_);
    const JobItem select = sequence_->Select(policy_, q_);
    ASSERT_TRUE(attend.status.ok() && select.status.ok()) << what << attend.status;
    const Selection& selection = select.result.selections[kv_head_];
    SelectionParts parts = SplitSelection(selection);
    ASSERT_FALSE(parts.strata.empty()) << what;
    const reference::KeyValues kv = context_.Head(kv_head_);
    const reference::KeyValues with_sink = reference::WithSinkRow(kv);
    std::vector<bool> tail(kTokens, false);
    for (int64_t t = begin(); t < end(); ++t) tail[t] = !index().strays[t];
    for (const uint32_t t : parts.exact) tail[t] = false;
    parts.exact.push_back(kTokens);  // the sink's row
    std::vector<Estimated> heads;
    for (int g = 0; g < spec_.group(); ++g) heads.push_back(EstimateLogits(g));
    const std::vector<bool> summed = PagesWithMass(heads);
    summed_pages_ = std::count(summed.begin(), summed.end(), true);
    const ProjectionSigns projection = ProjectionSigns::Of(policy_.seed);
    std::vector<double> signs;
    for (int i = 0; i < spec_.head_dim; ++i) signs.push_back(projection.negative(i) ? -1 : 1);
    for (int g = 0; g < spec_.group(); ++g) {
      const int head = kv_head_ * spec_.group() + g;
      const std::string of_head = what + " head " + std::to_string(head);
      std::vector<double> logits =
          reference::Logits(kv, QueryOf(head), spec_.softmax_scale, kTokens);
      logits.push_back(spec_.sink_logits.empty() ? -std::numeric_limits<double>::infinity()
                                                 : spec_.sink_logits[head]);
      const Estimated& e = heads[g];
      reference::CodeTerms codes = reference::TermsOfCodes(
          kv, index(), e.logits, e.variances, e.reference, tail, summed, spec_.hash.value_bits);
      codes.weights.push_back(0);
      codes.values.emplace_back(kv.d);
      const reference::Estimate wanted =
          reference::EstimateOutput(with_sink, logits, parts.exact, parts.strata, signs, &codes,
                                    PredictedTokens(parts.strata, tail));
      std::vector<double> out = wanted.numerator;
      for (double& x : out) x /= wanted.denominator;
      EXPECT_LT(reference::RelativeDistance(OutputOf(spec_, attend.result, 0, head), out),
                kTolerance)
          << of_head;
      EXPECT_NEAR(attend.result.lse[head], wanted.max + std::log(wanted.denominator), kTolerance)
          << of_head;
      const Certificate& c = attend.result.certificates[head];
      const double error = reference::ErrorQuantile(wanted.degrees, policy_.delta) *
                           std::sqrt(wanted.variance / wanted.norm_sq_unbiased);
      const double stated = std::max(error, 1.0 / 64);
      EXPECT_NEAR(c.relative_error, stated, 0.01 * stated) << of_head;
      EXPECT_NEAR(c.tail_mass, 1 - wanted.exact_denominator / wanted.denominator, kTolerance);
      // The answer of the rows alone is another one: this test can fail.
      const reference::Attention plain = reference::WeightedAttention(
          kv, QueryOf(head), spec_.softmax_scale, selection.indices, selection.log_weights);
      largest_difference_ =
          std::max(largest_difference_,
                   reference::RelativeDistance(OutputOf(spec_, attend.result, 0, head), plain.out));
    }
  }

  double largest_difference_ = 0;
  int64_t summed_pages_ = 0;

 private:
  // The tokens whose predictions count for each stratum: all, if it and those above have at most
  // 1,024; otherwise those of every s-th page, where s is a sixteenth of the pages. The strata of
  // tokens that were not drawn follow from those of the drawn ones only by their ranks, which this
  // test does not compute; so it asks the device for every token's stratum.
  std::vector<std::vector<uint32_t>> PredictedTokens(
      const std::vector<reference::SampledTokens>& strata, const std::vector<bool>& tail) {
    Policy whole = policy_;
    whole.pilot_token_count = 65536;
    const JobItem select = sequence_->Select(whole, q_);
    const Selection& all = select.result.selections[kv_head_];
    std::vector<std::vector<uint32_t>> tokens(strata.size());
    bool near = true;
    const int64_t first = begin() / 128, last = (end() - 1) / 128;
    const int64_t step = std::max<int64_t>(1, (last - first) / 16);
    for (size_t h = 0; h < strata.size(); ++h) {
      near = near && strata[h].token_count <= 1024;
      int64_t count = 0;
      for (size_t i = 0; i < all.indices.size(); ++i) {
        const uint32_t t = all.indices[i];
        if (all.strata[i] != kStratumTail + h || !tail[t]) continue;
        ++count;
        if (near || (t / 128 - first) % step == 0) tokens[h].push_back(t);
      }
      EXPECT_EQ(count, strata[h].token_count) << "not every token was drawn";
    }
    return tokens;
  }
  // Whether the codes of each page are summed: if the sum of its estimated exponentials, without
  // strays, is at least a quarter of what a page has on average, for some head.
  std::vector<bool> PagesWithMass(const std::vector<Estimated>& heads) const {
    const int64_t first = begin() / 128, end_page = (end() - 1) / 128 + 1;
    std::vector<bool> summed(index().closed_token_count() / 128, false);
    for (const Estimated& head : heads) {
      std::vector<double> of_page(summed.size(), 0.0);
      double sum = 0;
      for (int64_t t = begin(); t < end(); ++t) {
        if (index().strays[t]) continue;
        const double w = std::exp(head.logits[t] - head.reference);
        of_page[t / 128] += w;
        sum += w;
      }
      for (int64_t p = first; p < end_page; ++p) {
        if (of_page[p] > 0 && of_page[p] * static_cast<double>(end_page - first) >= 0.25 * sum) {
          summed[p] = true;
        }
      }
    }
    return summed;
  }
};

TEST_P(ValueCodes, CorrectTheAnswerOfTheCodes) {
  for (const auto& [bits, head_dim, group, dtype] :
       {std::tuple(2, 64, 3, DType::kBF16), std::tuple(1, 128, 1, DType::kF16),
        std::tuple(3, 64, 2, DType::kF32), std::tuple(2, 80, 5, DType::kBF16),
        std::tuple(1, 16, 2, DType::kF32), std::tuple(3, 48, 1, DType::kBF16)}) {
    const std::string what = std::to_string(bits) + " bits, d " + std::to_string(head_dim);
    Prepare(SpecOf(2, group, head_dim, dtype, bits));
    largest_difference_ = 0;
    for (kv_head_ = 0; kv_head_ < 2; ++kv_head_) {
      policy_ = DefaultPolicy(spec_);
      policy_.seed = 5;
      ExpectCorrected(what);
    }
    EXPECT_GT(largest_difference_, 20 * kTolerance) << what;
  }
}

// Codes and rows are both of the rows as they are stored.
TEST_P(ValueCodes, OfRowsOfEightBits) {
  for (const auto& [bits, head_dim, group, dtype] :
       {std::tuple(2, 128, 3, DType::kBF16), std::tuple(1, 80, 2, DType::kF32),
        std::tuple(3, 64, 5, DType::kF16)}) {
    ModelSpec spec = SpecOf(1, group, head_dim, dtype, bits);
    spec.row_type = RowType::kInt8;
    Prepare(spec);
    policy_ = DefaultPolicy(spec_);
    policy_.seed = 5;
    ExpectCorrected(std::to_string(bits) + " bits, d " + std::to_string(head_dim));
  }
}

// A sink logit is a row with value 0 that is always read.
TEST_P(ValueCodes, WithSinkLogits) {
  ModelSpec spec = SpecOf(2, 3, 64, DType::kBF16, 2);
  // The log-sum-exps are 9 to 11.
  spec.sink_logits = {9, 2, 14, -std::numeric_limits<float>::infinity(), 11, 30};
  Prepare(spec);
  for (kv_head_ = 0; kv_head_ < 2; ++kv_head_) {
    policy_ = DefaultPolicy(spec_);
    policy_.seed = 5;
    ExpectCorrected("sinks");
  }
}

// Pages without mass answer by their centres: here those whose keys are moved away from the query,
// by eight nats.
TEST_P(ValueCodes, PagesWithoutMassAnswerByTheirCentres) {
  Prepare(SpecOf(1, 1, 64, DType::kF32, 2), {}, [this](reference::Context& context) {
    double square = 0;
    for (const float x : q_) square += double{x} * x;
    const auto away = static_cast<float>(8 / (context.spec.softmax_scale * square));
    for (int64_t t = 0; t < context.n; ++t) {
      if (t / 128 % 8 == 3) continue;
      for (int i = 0; i < 64; ++i) context.k[t * 64 + i] -= away * q_[i];
    }
  });
  policy_ = DefaultPolicy(spec_);
  ExpectCorrected("few pages");
  // Pages 3, 11, 19, ... and few others, of 46.
  EXPECT_GE(summed_pages_, 3);
  EXPECT_LE(summed_pages_, 20);
}

// Codes that say nothing at all: keys of a thousand times the usual size, across the query. The
// attend succeeds as it does without value codes.
TEST_P(ValueCodes, CodesThatSayNothing) {
  for (const int key_bits : {1, 3}) {
    for (const float size : {150.0f, 1000.0f}) {
      HashSpec hash;
      hash.bits_per_dim = key_bits;
      hash.value_bits = 2;
      const ModelSpec spec = MakeSpec(1, 1, 64, DType::kF32, hash);
      reference::Context context = reference::GaussianContext(spec, 2500, 7);
      for (int64_t t = 0; t < context.n; ++t) {
        for (int i = 0; i < 64; ++i) context.k[t * 64 + i] *= i == 0 ? 0.1f : size;
      }
      std::vector<float> q(64, 0.0f);
      q[0] = 1;
      DeviceBench bench(GetParam(), spec);
      BenchSequence sequence(bench);
      ASSERT_TRUE(sequence.Append(context, 0, context.n).ok());
      const JobItem item = sequence.Attend(DefaultPolicy(spec), q);
      ASSERT_TRUE(item.status.ok()) << item.status;
      for (const float x : item.result.out) ASSERT_TRUE(std::isfinite(x));
      ASSERT_TRUE(std::isfinite(item.result.lse[0]));
      const Certificate& c = item.result.certificates[0];
      EXPECT_GE(c.tail_mass, 0);
      EXPECT_LE(c.tail_mass, 1);
    }
  }
}

TEST_P(ValueCodes, SameBitsWithAnyNumberOfThreadsAndAloneOrWithOthers) {
  const ModelSpec spec = SpecOf(2, 2, 64, DType::kBF16, 2);
  const reference::Context context = reference::TraceContext(spec, 40000, 31);
  const std::vector<float> q = reference::TraceQueries(context, 3, 32, 1.5);
  const std::vector<float> one(q.begin() + 2 * 4 * 64, q.end());
  std::vector<float> first;
  for (const int threads : {1, 2, 4}) {
    DeviceBench bench(GetParam(), spec, threads);
    BenchSequence sequence(bench);
    ASSERT_TRUE(sequence.Append(context, 0, context.n).ok());
    const JobItem item = sequence.Attend(DefaultPolicy(spec), q);
    ASSERT_TRUE(item.status.ok()) << item.status;
    if (first.empty()) first = item.result.out;
    EXPECT_EQ(item.result.out, first) << threads;
    const std::vector<float> alone = sequence.Attend(DefaultPolicy(spec), one).result.out;
    EXPECT_TRUE(std::equal(alone.begin(), alone.end(), first.begin() + 2 * 4 * 64)) << threads;
  }
}

// A limit on the rows is kept and used, and takes the promise; with no row of the tail, the answer
// is that of the codes.
TEST_P(ValueCodes, LimitsOfRows) {
  Prepare(SpecOf(2, 2, 64, DType::kBF16, 2));
  policy_ = DefaultPolicy(spec_);
  policy_.epsilon = 0.01;
  const std::vector<float> exact = [&] {
    Policy all;
    all.selector = Selector::kAll;
    return sequence_->Attend(all, q_).result.out;
  }();
  const auto rows = sequence_->Attend(policy_, q_).result.touched_row_counts;
  const int64_t least = 64 + (kTokens - end()) + 64;
  for (const int64_t limit : {least, least + 100, least + 300, least + 600}) {
    if (limit * 5 / 4 > *std::min_element(rows.begin(), rows.end())) break;
    policy_.row_count_max = limit;
    int64_t most = 0;
    for (policy_.seed = 0; policy_.seed < 8; ++policy_.seed) {
      const JobItem item = sequence_->Attend(policy_, q_);
      ASSERT_TRUE(item.status.ok()) << item.status;
      for (int h = 0; h < 2; ++h) {
        ASSERT_LE(item.result.touched_row_counts[h], limit);
        most = std::max(most, item.result.touched_row_counts[h]);
      }
      for (const Certificate& c : item.result.certificates) ASSERT_EQ(c.promise, Promise::kNone);
      for (int h = 0; h < 4; ++h) {
        const std::vector<double> wanted(exact.begin() + h * 64, exact.begin() + (h + 1) * 64);
        EXPECT_LT(reference::RelativeDistance(OutputOf(spec_, item.result, 0, h), wanted), 0.3)
            << "limit " << limit;
      }
    }
    EXPECT_GE(most, limit * 9 / 10) << limit;
  }
}

// Attention to the selected rows alone is not what the attend answers.
TEST_P(ValueCodes, SelectionsPromiseNothing) {
  Prepare(SpecOf(1, 2, 64, DType::kBF16, 2));
  policy_ = DefaultPolicy(spec_);
  for (const Certificate& c : sequence_->Attend(policy_, q_).result.certificates) {
    EXPECT_EQ(c.promise, Promise::kStatistical);
  }
  for (const Certificate& c : sequence_->Select(policy_, q_).result.certificates) {
    EXPECT_EQ(c.promise, Promise::kNone);
    EXPECT_EQ(c.relative_error, std::numeric_limits<float>::infinity());
  }
}

// Selectors and tails of comparison methods are served as without value codes, bit for bit.
TEST_P(ValueCodes, OtherMethodsDoNotUseThem) {
  const reference::Context context =
      reference::TraceContext(SpecOf(1, 2, 64, DType::kBF16, 0), kTokens, 71);
  const std::vector<float> q = reference::TraceQueries(context, 1, 72, 1.5);
  const auto attend = [&](int value_bits, const Policy& policy) {
    DeviceBench bench(GetParam(), SpecOf(1, 2, 64, DType::kBF16, value_bits));
    BenchSequence sequence(bench);
    EXPECT_TRUE(sequence.Append(context, 0, kTokens).ok());
    return sequence.Attend(policy, q);
  };
  const Policy ours = DefaultPolicy(context.spec);
  Policy oracle = ours, uniform = ours, none = ours;
  oracle.selector = Selector::kOracle;
  uniform.tail = Tail::kUniform;
  none.tail = Tail::kNone;
  for (const Policy& policy : {oracle, uniform, none}) {
    EXPECT_EQ(attend(0, policy).result.out, attend(2, policy).result.out);
  }
  EXPECT_NE(attend(0, ours).result.out, attend(2, ours).result.out);
}

// Appends in any chunks, forks and truncation give the same bits.
TEST_P(ValueCodes, DoNotDependOnHowRowsCame) {
  Prepare(SpecOf(2, 2, 64, DType::kBF16, 2));
  policy_ = DefaultPolicy(spec_);
  const std::vector<float> at_once = sequence_->Attend(policy_, q_).result.out;
  BenchSequence chunks(*bench_);
  ASSERT_TRUE(chunks.Append(context_, 0, kTokens, 777).ok());
  EXPECT_EQ(chunks.Attend(policy_, q_).result.out, at_once);
  BenchSequence fork = chunks.Fork(5000);
  ASSERT_TRUE(fork.Append(context_, 5000, kTokens, 1).ok());
  EXPECT_EQ(fork.Attend(policy_, q_).result.out, at_once);
  chunks.Truncate(2000);
  ASSERT_TRUE(chunks.Append(context_, 2000, kTokens).ok());
  EXPECT_EQ(chunks.Attend(policy_, q_).result.out, at_once);
}

INSTANTIATE_TEST_SUITE_P(Devices, ValueCodes, ::testing::ValuesIn(DeviceFactories()),
                         [](const auto& info) { return info.param.name; });

}  // namespace
}  // namespace spillway
