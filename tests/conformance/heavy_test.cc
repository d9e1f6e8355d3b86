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
    kv_head_ = 0;
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
    const Selection& s = item.attend->selections[kv_head_];
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

  int kv_head_ = 0;  // whose set is compared
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

// The hash MLPs of one layer, in fp64.
class Mlps {
 public:
  Mlps(int count, int d, int hidden, int bits, uint32_t seed)
      : count_(count), d_(d), hidden_(hidden), bits_(bits) {
    std::mt19937 random(seed);
    std::normal_distribution<float> normal(0, 0.3f);
    const auto values = [&](int size) {
      std::vector<float> x(size);
      for (float& e : x) e = normal(random);
      return x;
    };
    w1_ = values(count * d * hidden);
    b1_ = values(count * hidden);
    w2_ = values(count * hidden * bits);
  }

  std::vector<std::byte> File() const {
    SafeTensorsWriter writer;
    writer.Add("layers.0.w1", {count_, d_, hidden_}, w1_);
    writer.Add("layers.0.b1", {count_, hidden_}, b1_);
    writer.Add("layers.0.w2", {count_, hidden_, bits_}, w2_);
    return writer.File();
  }
  // y of one of them.
  std::vector<double> Output(int mlp, const std::vector<double>& x) const {
    std::vector<double> y(bits_, 0.0);
    for (int h = mlp * hidden_; h < (mlp + 1) * hidden_; ++h) {
      double z = b1_[h];
      for (int i = 0; i < d_; ++i) z += x[i] * w1_[(mlp * d_ + i) * hidden_ + h - mlp * hidden_];
      z /= 1 + std::exp(-z);
      for (int j = 0; j < bits_; ++j) y[j] += z * w2_[h * bits_ + j];
    }
    return y;
  }

 private:
  const int count_, d_, hidden_, bits_;
  std::vector<float> w1_, b1_, w2_;
};

TEST_P(Heavy, HammingByMlp) {
  constexpr int kD = 64, kHidden = 48, kKvHeads = 2;
  struct Case {
    int group, bits;
    bool per_query_head, raw_keys;
  };
  for (const auto& [group, bits, per_query_head, raw_keys] :
       {Case{3, 96, false, false}, Case{3, 96, false, true}, Case{3, 96, true, false},
        Case{4, 256, true, true}, Case{1, 64, true, true}}) {
    const Mlps mlps(kKvHeads * (per_query_head ? group : 1), kD, kHidden, bits, 8);
    Prepare(MakeSpec(kKvHeads, group, kD, DType::kF32,
                     {.kind = HashKind::kMlp,
                      .hash_bits = bits,
                      .hidden_dim = kHidden,
                      .per_query_head = per_query_head,
                      .raw_keys = raw_keys}),
            mlps.File());
    for (kv_head_ = 0; kv_head_ < kKvHeads; ++kv_head_) {
      const reference::KeyValues kv = context_.Head(kv_head_);
      const std::vector<double> centre =
          raw_keys ? std::vector<double>(kD, 0.0) : reference::KeyCentre(kv);
      std::vector<BinRange> bins(end() - begin());
      for (int q = kv_head_ * group; q < (kv_head_ + 1) * group; ++q) {
        const int mlp = per_query_head ? q : kv_head_;
        std::vector<std::vector<double>> keys;
        for (int64_t t = begin(); t < end(); ++t) {
          std::vector<double> x(kv.Key(t).begin(), kv.Key(t).end());
          for (int i = 0; i < kD; ++i) x[i] -= centre[i];
          keys.push_back(mlps.Output(mlp, x));
        }
        const std::vector<BinRange> of_head =
            HammingRanges(keys, {mlps.Output(mlp, QueryOf(q))}, 2e-5);
        for (size_t i = 0; i < bins.size(); ++i) {
          bins[i].low += of_head[i].low;
          bins[i].high += of_head[i].high;
        }
      }
      ExpectTopK(bins, "mlp group " + std::to_string(group) +
                           (per_query_head ? " per query head" : "") +
                           (raw_keys ? " raw keys" : "") + " KV head " + std::to_string(kv_head_));
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Devices, Heavy, ::testing::ValuesIn(DeviceFactories()),
                         [](const auto& info) { return info.param.name; });

}  // namespace
}  // namespace spillway
