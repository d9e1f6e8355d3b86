// The heavy set is the one that the definitions give, recomputed in fp64.
#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "host/codes/rotation.h"
#include "tests/conformance/heavy_fixture.h"
#include "tests/reference/codes.h"

namespace spillway {
namespace {

using reference::BinRange;

constexpr int kGroup = 3;

class Heavy : public HeavyTest {};

TEST_P(Heavy, Oracle) {
  for (const DType dtype : {DType::kF32, DType::kF16, DType::kBF16}) {
    Prepare(MakeSpec(1, kGroup, 64, dtype));
    policy_.selector = Selector::kOracle;
    const reference::KeyValues kv = context_.Head(0);
    std::vector<std::vector<double>> logits;
    for (int g = 0; g < kGroup; ++g) {
      logits.push_back(reference::Logits(kv, QueryOf(g), spec_.softmax_scale, kTokens));
    }
    ExpectTopK(GroupBins(logits), "oracle");
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

INSTANTIATE_TEST_SUITE_P(Devices, Heavy, ::testing::ValuesIn(DeviceFactories()),
                         [](const auto& info) { return info.param.name; });

}  // namespace
}  // namespace spillway
