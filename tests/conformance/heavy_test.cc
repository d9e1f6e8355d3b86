// The heavy set equals that of the definitions, recomputed in fp64.
#include <gtest/gtest.h>

#include <algorithm>
#include <random>
#include <string>
#include <vector>

#include "host/codes/rotation.h"
#include "tests/conformance/heavy_fixture.h"
#include "tests/reference/codes.h"
#include "tests/reference/elements.h"

namespace spillway {
namespace {

using reference::BinRange;

constexpr int kGroup = 3;

class Heavy : public HeavyTest {
 protected:
  // A unit vector orthogonal to all queries of the group.
  std::vector<double> AcrossQueries(const reference::Context& context, uint64_t seed) const {
    std::mt19937_64 random(seed);
    std::normal_distribution<double> normal;
    std::vector<std::vector<double>> axes;
    for (int g = 0; g <= kGroup; ++g) {
      std::vector<double> x(context.spec.head_dim);
      for (double& e : x) e = normal(random);
      if (g < kGroup) x = QueryOf(g);
      for (const std::vector<double>& axis : axes) {
        const double along = reference::Dot(x, axis);
        for (size_t i = 0; i < x.size(); ++i) x[i] -= along * axis[i];
      }
      const double length = reference::Norm(x);
      for (double& e : x) e /= length;
      axes.push_back(x);
    }
    return axes.back();
  }

  void ExpectOracle(const std::string& what) {
    policy_.selector = Selector::kOracle;
    const reference::KeyValues kv = context_.Head(0);
    std::vector<std::vector<double>> logits;
    for (int g = 0; g < kGroup; ++g) {
      logits.push_back(reference::Logits(kv, QueryOf(g), spec_.softmax_scale, kTokens));
    }
    ExpectTopK(GroupBins(Selector::kOracle, logits), what);
    ExpectTopP(logits, what);
  }

  void ExpectAsymmetric(int bits, const std::string& what) {
    policy_.selector = Selector::kAsymmetric;
    const reference::KeyValues kv = context_.Head(0);
    const std::vector<float> rotation = MakeRotation(spec_.head_dim, spec_.hash.seed, 0);
    std::vector<reference::RotationCode> codes;
    for (int64_t t = 0; t < index().closed_token_count(); ++t) {
      codes.push_back(reference::EncodeRotated(kv.Key(t), index().CentreOf(t), rotation, bits));
    }
    std::vector<std::vector<double>> logits;
    for (int g = 0; g < kGroup; ++g) {
      const reference::QuantisedQuery query = reference::QuantiseQuery(QueryOf(g), rotation);
      ASSERT_GT(query.border_distance, kCoordinateTolerance) << what << ": choose another seed";
      logits.emplace_back();
      for (size_t t = 0; t < codes.size(); ++t) {
        logits[g].push_back(
            reference::AsymmetricLogit(codes[t], query, bits, spec_.softmax_scale) +
            spec_.softmax_scale *
                reference::Dot(QueryOf(g), index().CentreOf(static_cast<int64_t>(t))));
      }
    }
    std::vector<BinRange> bins = GroupBins(Selector::kAsymmetric, logits);
    for (size_t i = 0; i < bins.size(); ++i) {
      const reference::RotationCode& code = codes[begin() + i];
      const bool certain = code.border_distance > kCoordinateTolerance && code.factor_margin > 1e-5;
      if (!certain && !index().strays[begin() + i]) bins[i] = kAnyBin;
    }
    ExpectTopK(bins, what);
    ExpectTopP(logits, what);
  }
};

// The first pages are raised to the later ones, which lie elsewhere, and one page lies elsewhere
// again.
TEST_P(Heavy, ValuesThatMove) {
  for (const DType dtype : {DType::kF32, DType::kBF16}) {
    Prepare(MakeSpec(1, kGroup, 64, dtype), {}, [dtype](reference::Context& context) {
      for (int64_t t = 1024; t < context.n; ++t) {
        for (int i = 0; i < 64; ++i) {
          float& v = context.v[t * 64 + i];
          v += t / 128 == 20 ? (i % 2 == 0 ? 300.0f : -300.0f) : 60.0f;
          v = static_cast<float>(reference::Round(dtype, v));
        }
      }
    });
    EXPECT_EQ(index().lifts[0], 0);
    EXPECT_GT(index().lifts[30], 16);
    EXPECT_GT(index().lifts[20], index().lifts[30] + 8);
    EXPECT_GT(index().levels[30].low, index().levels[0].high + 128 * 16);
    ExpectOracle("oracle");
    ExpectAsymmetric(3, "asymmetric");
  }
}

TEST_P(Heavy, Oracle) {
  for (const DType dtype : {DType::kF32, DType::kF16, DType::kBF16}) {
    Prepare(MakeSpec(1, kGroup, 64, dtype));
    ExpectOracle("oracle");
  }
}

// Without codes, values have no norms, and all tokens up to the window are scored.
TEST_P(Heavy, OracleWithoutCodes) {
  Prepare(MakeSpec(1, kGroup, 64, DType::kF32, {.kind = HashKind::kNone}));
  ASSERT_EQ(end(), kTokens - 64);
  ExpectOracle("oracle without codes");
}

TEST_P(Heavy, Asymmetric) {
  for (const auto& [d, bits] : {std::pair(64, 1), std::pair(64, 2), std::pair(64, 4),
                                std::pair(80, 3), std::pair(128, 2), std::pair(256, 2)}) {
    Prepare(MakeSpec(1, kGroup, d, DType::kBF16,
                     {.kind = HashKind::kRotation, .bits_per_dim = bits, .seed = 5}));
    ExpectAsymmetric(bits, "d " + std::to_string(d) + " bits " + std::to_string(bits));
  }
}

// Outlier keys, in a direction that no query sees and that codes cannot represent, and outlier
// values: all are heavy, and the other tokens are ranked as if these did not exist.
TEST_P(Heavy, StraysStandBeside) {
  for (const int bits : {1, 3}) {
    Prepare(MakeSpec(1, kGroup, 64, DType::kF32,
                     {.kind = HashKind::kRotation, .bits_per_dim = bits, .seed = 5}),
            {}, [&](reference::Context& context) {
              for (const int t : {100, 900, 2000, 3333, 5800}) {
                const std::vector<double> across = AcrossQueries(context, t);
                for (int i = 0; i < 64; ++i) {
                  context.k[t * 64 + i] = static_cast<float>(1e5 * across[i]);
                }
              }
              for (const int t : {700, 4000, 4001}) {
                for (int i = 0; i < 64; ++i) context.v[t * 64 + i] *= 1e6f;
              }
            });
    // The context has a few strays already.
    const std::vector<int64_t> strays = Strays();
    for (const int64_t t : {100, 700, 900, 2000, 3333, 4000, 4001, 5800}) {
      ASSERT_TRUE(std::binary_search(strays.begin(), strays.end(), t)) << t;
    }
    ASSERT_LT(strays.size(), 20u);
    ExpectAsymmetric(bits, "strays, bits " + std::to_string(bits));
    ExpectOracle("strays, oracle");
  }
}

INSTANTIATE_TEST_SUITE_P(Devices, Heavy, ::testing::ValuesIn(DeviceFactories()),
                         [](const auto& info) { return info.param.name; });

}  // namespace
}  // namespace spillway
