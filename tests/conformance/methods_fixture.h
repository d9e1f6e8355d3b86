#pragma once

#include <cmath>
#include <memory>
#include <string>
#include <vector>

#include "host/codes/rotation.h"
#include "tests/conformance/heavy_fixture.h"
#include "tests/conformance/method_models.h"
#include "tests/reference/codes.h"
#include "tests/reference/methods.h"

namespace spillway {

// Tokens as a selector sees them, in fp64.
class MethodsTest : public HeavyTest {
 protected:
  struct Ranked {
    std::vector<std::vector<double>> logits;  // [G][kTokens]; none of hamming
    std::vector<reference::BinRange> bins;    // from begin() on
  };

  void Prepare(const IndexedModel& model) {
    model_ = std::make_unique<IndexedModel>(model);
    HeavyTest::Prepare(model.spec, model.file);
  }

  // Of KV head kv_head_.
  Ranked RankedBy(Selector selector) const {
    switch (selector) {
      case Selector::kAsymmetric:
        return ByAsymmetric();
      case Selector::kHamming:
        return ByHamming();
      case Selector::kInt4Keys:
      case Selector::kDoubleSparsity:
        return ByInt4Keys(selector == Selector::kDoubleSparsity);
      case Selector::kQuest:
        return ByLogits([&](const reference::KeyValues& kv, const std::vector<double>& q) {
          return reference::PageBounds(kv, q, spec_.softmax_scale,
                                       spec_.indices.quest_page_token_count, kTokens);
        });
      default:
        return ByLogits([&](const reference::KeyValues& kv, const std::vector<double>& q) {
          return reference::Logits(kv, q, spec_.softmax_scale, kTokens);
        });
    }
  }

 private:
  std::vector<double> GroupQuery(int g) const { return QueryOf(kv_head_ * spec_.group() + g); }

  std::vector<double> Centre(const reference::KeyValues& kv) const {
    return spec_.hash.raw_keys ? std::vector<double>(spec_.head_dim, 0.0)
                               : reference::KeyCentre(kv);
  }

  template <typename F>
  Ranked ByLogits(const F& logits_of) const {
    const reference::KeyValues kv = context_.Head(kv_head_);
    Ranked ranked;
    for (int g = 0; g < spec_.group(); ++g) ranked.logits.push_back(logits_of(kv, GroupQuery(g)));
    ranked.bins = GroupBins(ranked.logits);
    return ranked;
  }

  Ranked ByAsymmetric() const {
    const reference::KeyValues kv = context_.Head(kv_head_);
    const int bits = spec_.hash.bits_per_dim;
    const std::vector<float> rotation = MakeRotation(spec_.head_dim, spec_.hash.seed, 0);
    const std::vector<double> centre = Centre(kv);
    std::vector<reference::RotationCode> codes;
    for (int64_t t = 0; t < kTokens; ++t) {
      codes.push_back(reference::EncodeRotated(kv.Key(t), centre, rotation, bits));
    }
    Ranked ranked;
    for (int g = 0; g < spec_.group(); ++g) {
      const reference::QuantisedQuery query = reference::QuantiseQuery(GroupQuery(g), rotation);
      EXPECT_GT(query.border_distance, kCoordinateTolerance) << "choose another seed";
      ranked.logits.emplace_back();
      for (const auto& code : codes) {
        ranked.logits[g].push_back(
            reference::AsymmetricLogit(code, query, bits, spec_.softmax_scale));
      }
    }
    ranked.bins = GroupBins(ranked.logits);
    for (size_t i = 0; i < ranked.bins.size(); ++i) {
      const reference::RotationCode& code = codes[begin() + i];
      const bool certain = code.border_distance > kCoordinateTolerance && code.factor_margin > 1e-5;
      if (!certain) ranked.bins[i] = kAnyBin;
    }
    return ranked;
  }

  Ranked ByHamming() const {
    const reference::KeyValues kv = context_.Head(kv_head_);
    const std::vector<float> rotation = MakeRotation(spec_.head_dim, spec_.hash.seed, 0);
    const std::vector<double> centre = Centre(kv);
    std::vector<std::vector<double>> keys, queries;
    for (int64_t t = begin(); t < end(); ++t) {
      std::vector<double> x(kv.Key(t).begin(), kv.Key(t).end());
      for (int i = 0; i < spec_.head_dim; ++i) x[i] -= centre[i];
      keys.push_back(reference::Rotated(rotation, x));
    }
    for (int g = 0; g < spec_.group(); ++g) {
      queries.push_back(reference::Rotated(rotation, GroupQuery(g)));
    }
    return {{}, HammingRanges(keys, queries, 2e-5)};
  }

  // From 4 bits of every element, or of the label channels'.
  Ranked ByInt4Keys(bool labels) const {
    const reference::KeyValues kv = context_.Head(kv_head_);
    const auto chosen = [&](std::span<const double> x) {
      return labels ? reference::Chosen(x, model_->channels[kv_head_])
                    : std::vector<double>(x.begin(), x.end());
    };
    std::vector<reference::Int4Vector> keys;
    for (int64_t t = 0; t < kTokens; ++t) {
      keys.push_back(reference::QuantiseInt4(chosen(kv.Key(t))));
    }
    Ranked ranked = ByLogits([&](const reference::KeyValues&, const std::vector<double>& query) {
      const std::vector<double> q = chosen(query);
      std::vector<double> logits;
      for (const auto& key : keys) {
        logits.push_back(spec_.softmax_scale * reference::Int4Dot(key, q));
      }
      return logits;
    });
    for (size_t i = 0; i < ranked.bins.size(); ++i) {
      const reference::Int4Vector& key = keys[begin() + i];
      const bool certain = key.border_distance > kCoordinateTolerance && key.scale_margin > 1e-6;
      if (!certain) ranked.bins[i] = kAnyBin;
    }
    return ranked;
  }

  std::unique_ptr<IndexedModel> model_;
};

}  // namespace spillway
