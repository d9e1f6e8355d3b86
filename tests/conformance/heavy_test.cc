// The heavy set is the one that the definitions give, recomputed in fp64.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <random>
#include <set>
#include <string>
#include <vector>

#include "host/codes/rotation.h"
#include "tests/conformance/device_bench.h"
#include "tests/host/codes/safetensors_file.h"
#include "tests/reference/codes.h"
#include "tests/reference/ranking.h"

namespace spillway {
namespace {

using reference::BinRange;
using reference::Context;
using reference::Membership;

constexpr int64_t kTokens = 6000;
constexpr int kGroup = 3;
// fp32 against fp64: where scores come closer to a bin's border than this, or
// a coordinate to a quantiser's, either side is right.
constexpr double kScoreTolerance = 1e-4;
constexpr double kCoordinateTolerance = 1e-5;
constexpr BinRange kAnyBin = {0, 4095};

class Heavy : public ::testing::TestWithParam<DeviceFactory> {
 protected:
  void Prepare(const ModelSpec& spec, std::span<const std::byte> safetensors = {}) {
    sequence_.reset();
    spec_ = spec;
    bench_ = std::make_unique<DeviceBench>(GetParam(), spec, 0, safetensors);
    context_ = reference::TraceContext(spec, kTokens, 71);
    q_ = reference::TraceQueries(context_, 1, 72, 1.5);
    sequence_ = std::make_unique<BenchSequence>(*bench_);
    ASSERT_TRUE(sequence_->Append(context_, 0, kTokens).ok());
    policy_ = DefaultPolicy(spec);
    policy_.tail = Tail::kNone;
  }

  int64_t begin() const { return policy_.sink_token_count; }
  int64_t end() const { return kTokens - policy_.window_token_count; }
  std::vector<double> QueryOf(int g) const { return reference::Query(spec_, q_, 0, g); }

  std::set<int64_t> DeviceSet() {
    const JobItem item = sequence_->Select(policy_, q_);
    EXPECT_TRUE(item.status.ok()) << item.status;
    std::set<int64_t> set;
    const Selection& s = item.attend->selections[0];
    for (size_t i = 0; i < s.indices.size(); ++i) {
      if (s.strata[i] == kStratumHeavy) set.insert(s.indices[i]);
    }
    return set;
  }

  // bins: of candidates, begin() first.
  void ExpectTopK(const std::vector<BinRange>& bins, const std::string& what) {
    for (const int64_t k : {1, 37, 256, 1000}) {
      policy_.heavy_kind = HeavyKind::kCount;
      policy_.heavy_count = k;
      ExpectSet(bins, k, what + " k " + std::to_string(k));
    }
    policy_.heavy_kind = HeavyKind::kFraction;
    for (const double fraction : {0.0101, 0.08}) {
      policy_.heavy_fraction = fraction;
      ExpectSet(bins, static_cast<int64_t>(std::ceil(fraction * kTokens)), what + " fraction");
    }
  }

  void ExpectSet(const std::vector<BinRange>& bins, int64_t k, const std::string& what) {
    const std::set<int64_t> got = DeviceSet();
    EXPECT_EQ(static_cast<int64_t>(got.size()), k) << what;
    const std::vector<Membership> wanted = reference::TopK(bins, k);
    int64_t open = 0;
    for (size_t i = 0; i < wanted.size(); ++i) {
      const bool in = got.count(begin() + static_cast<int64_t>(i)) > 0;
      if (wanted[i] == Membership::kOpen) {
        ++open;
      } else {
        ASSERT_EQ(in, wanted[i] == Membership::kIn) << what << " token " << begin() + i;
      }
    }
    // About one token in a hundred is undecided.
    EXPECT_LT(open, static_cast<int64_t>(bins.size()) / 50 + k / 10) << what;
  }

  // Each head's set by mass; the union is heavy. Tokens that fp32 may place
  // otherwise (uncertain) can move a head's threshold, so those runs count the
  // difference instead.
  void ExpectTopP(const std::vector<std::vector<double>>& logits, const std::string& what) {
    policy_.heavy_kind = HeavyKind::kMass;
    for (const auto& [mass, floor, ceiling] :
         {std::tuple(0.5, 64, 4096), std::tuple(0.2, 1, 4096), std::tuple(0.9, 64, 100),
          std::tuple(0.01, 500, 600)}) {
      policy_.heavy_mass = mass;
      policy_.heavy_floor = floor;
      policy_.heavy_ceiling = ceiling;
      std::set<int64_t> wanted;
      for (const std::vector<double>& l : logits) {
        std::vector<int> bins;
        for (double s : reference::HeadScores(l, begin(), end())) {
          bins.push_back(reference::ScoreBin(s));
        }
        for (int64_t i : reference::ExactTopP(bins, mass, floor, ceiling)) {
          wanted.insert(begin() + i);
        }
      }
      const std::set<int64_t> got = DeviceSet();
      std::vector<int64_t> difference;
      std::set_symmetric_difference(got.begin(), got.end(), wanted.begin(), wanted.end(),
                                    std::back_inserter(difference));
      EXPECT_LE(difference.size(), 2 + wanted.size() / 100)
          << what << " mass " << mass << " wanted " << wanted.size() << " got " << got.size();
    }
  }

  ModelSpec spec_;
  std::unique_ptr<DeviceBench> bench_;
  Context context_;
  std::vector<float> q_;
  std::unique_ptr<BenchSequence> sequence_;
  Policy policy_;
};

TEST_P(Heavy, Oracle) {
  for (const DType dtype : {DType::kF32, DType::kF16, DType::kBF16}) {
    Prepare(MakeSpec(1, kGroup, 64, dtype));
    policy_.selector = Selector::kOracle;
    const reference::KeyValues kv = context_.Head(0);
    std::vector<std::vector<double>> logits;
    for (int g = 0; g < kGroup; ++g) {
      logits.push_back(reference::Logits(kv, QueryOf(g), spec_.softmax_scale, kTokens));
    }
    std::vector<BinRange> bins;
    for (double s : reference::GroupScores(logits, begin(), end())) {
      bins.push_back(reference::RangeOf(s, kScoreTolerance));
    }
    ExpectTopK(bins, "oracle");
    ExpectTopP(logits, "oracle");
  }
}

TEST_P(Heavy, Asymmetric) {
  for (const auto& [d, bits] : {std::pair(64, 1), std::pair(64, 2), std::pair(64, 4),
                                std::pair(80, 3), std::pair(128, 2), std::pair(256, 2)}) {
    Prepare(MakeSpec(1, kGroup, d, DType::kBF16,
                     {.kind = HashKind::kRotation, .bits_per_dim = bits, .seed = 5}));
    const std::string what = "d " + std::to_string(d) + " bits " + std::to_string(bits);
    const reference::KeyValues kv = context_.Head(0);
    const std::vector<float> rotation = MakeRotation(d, 5, 0);
    const std::vector<double> centre = reference::KeyCentre(kv);
    std::vector<reference::RotationCode> codes;
    for (int64_t t = 0; t < kTokens; ++t) {
      codes.push_back(reference::EncodeRotated(kv.Key(t), centre, rotation, bits));
    }
    std::vector<std::vector<double>> logits;
    for (int g = 0; g < kGroup; ++g) {
      const reference::QuantisedQuery query = reference::QuantiseQuery(QueryOf(g), rotation);
      ASSERT_GT(query.border_distance, kCoordinateTolerance) << what << ": choose another seed";
      logits.emplace_back();
      for (const auto& code : codes) {
        logits[g].push_back(reference::AsymmetricLogit(code, query, bits, spec_.softmax_scale));
      }
    }
    const std::vector<double> scores = reference::GroupScores(logits, begin(), end());
    std::vector<BinRange> bins;
    for (size_t i = 0; i < scores.size(); ++i) {
      const reference::RotationCode& code = codes[begin() + i];
      const bool certain = code.border_distance > kCoordinateTolerance && code.factor_margin > 1e-5;
      bins.push_back(certain ? reference::RangeOf(scores[i], kScoreTolerance) : kAnyBin);
    }
    ExpectTopK(bins, what);
    ExpectTopP(logits, what);
  }
}

// Ranges of matching bits from outputs whose signs are the bits; one closer to
// zero than the tolerance may be either.
std::vector<BinRange> HammingRanges(const std::vector<std::vector<double>>& keys,
                                    const std::vector<std::vector<double>>& queries,
                                    double tolerance) {
  std::vector<BinRange> bins;
  for (const std::vector<double>& key : keys) {
    BinRange range;
    for (const std::vector<double>& query : queries) {
      for (size_t j = 0; j < key.size(); ++j) {
        const bool open = std::fabs(key[j]) < tolerance || std::fabs(query[j]) < tolerance;
        const bool match = (key[j] > 0) == (query[j] > 0);
        range.low += match && !open;
        range.high += match || open;
      }
    }
    bins.push_back(range);
  }
  return bins;
}

TEST_P(Heavy, HammingByRotation) {
  for (const auto& [d, bits] : {std::pair(64, 1), std::pair(80, 2), std::pair(128, 2)}) {
    Prepare(MakeSpec(1, kGroup, d, DType::kBF16,
                     {.kind = HashKind::kRotation, .bits_per_dim = bits, .seed = 6}));
    policy_.selector = Selector::kHamming;
    const reference::KeyValues kv = context_.Head(0);
    const std::vector<float> rotation = MakeRotation(d, 6, 0);
    const std::vector<double> centre = reference::KeyCentre(kv);
    std::vector<std::vector<double>> keys, queries;
    for (int64_t t = begin(); t < end(); ++t) {
      std::vector<double> x(kv.Key(t).begin(), kv.Key(t).end());
      for (int i = 0; i < d; ++i) x[i] -= centre[i];
      keys.push_back(reference::Rotated(rotation, x));
    }
    for (int g = 0; g < kGroup; ++g) queries.push_back(reference::Rotated(rotation, QueryOf(g)));
    ExpectTopK(HammingRanges(keys, queries, 2e-5), "hamming d " + std::to_string(d));
  }
}

TEST_P(Heavy, HammingByMlp) {
  constexpr int kD = 64, kHidden = 48, kBits = 96;
  std::mt19937 random(8);
  std::normal_distribution<float> normal;
  const auto values = [&](int count, float scale) {
    std::vector<float> x(count);
    for (float& e : x) e = scale * normal(random);
    return x;
  };
  const std::vector<float> w1 = values(kD * kHidden, 0.3f), b1 = values(kHidden, 0.3f),
                           w2 = values(kHidden * kBits, 0.3f);
  SafeTensorsWriter writer;
  writer.Add("layers.0.w1", {1, kD, kHidden}, w1);
  writer.Add("layers.0.b1", {1, kHidden}, b1);
  writer.Add("layers.0.w2", {1, kHidden, kBits}, w2);
  Prepare(MakeSpec(1, kGroup, kD, DType::kF32,
                   {.kind = HashKind::kMlp, .hash_bits = kBits, .hidden_dim = kHidden}),
          writer.File());
  const auto output = [&](const std::vector<double>& x) {
    std::vector<double> y(kBits, 0.0);
    for (int h = 0; h < kHidden; ++h) {
      double z = b1[h];
      for (int i = 0; i < kD; ++i) z += x[i] * w1[i * kHidden + h];
      z /= 1 + std::exp(-z);
      for (int j = 0; j < kBits; ++j) y[j] += z * w2[h * kBits + j];
    }
    return y;
  };
  const reference::KeyValues kv = context_.Head(0);
  const std::vector<double> centre = reference::KeyCentre(kv);
  std::vector<std::vector<double>> keys, queries;
  for (int64_t t = begin(); t < end(); ++t) {
    std::vector<double> x(kv.Key(t).begin(), kv.Key(t).end());
    for (int i = 0; i < kD; ++i) x[i] -= centre[i];
    keys.push_back(output(x));
  }
  for (int g = 0; g < kGroup; ++g) queries.push_back(output(QueryOf(g)));
  ExpectTopK(HammingRanges(keys, queries, 2e-5), "mlp");
}

INSTANTIATE_TEST_SUITE_P(Devices, Heavy, ::testing::ValuesIn(DeviceFactories()),
                         [](const auto& info) { return info.param.name; });

}  // namespace
}  // namespace spillway
