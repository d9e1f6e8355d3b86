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

// Ranks the tokens as each selector does, in fp64.
class MethodsTest : public HeavyTest {
 protected:
  struct Ranked {
    std::vector<std::vector<double>> logits;  // [G][kTokens]; empty for hamming
    std::vector<reference::BinRange> bins;    // one per token, from begin() on
  };

  void Prepare(const IndexedModel& model) {
    model_ = std::make_unique<IndexedModel>(model);
    HeavyTest::Prepare(model.spec, model.file);
  }

  // The ranking for KV head kv_head_.
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
        return ByLogits(
            selector, [&](const reference::KeyValues& kv, const std::vector<double>& q) {
              return reference::PageBounds(kv, q, spec_.softmax_scale,
                                           spec_.indices.quest_page_token_count, kTokens);
            });
      default:
        return ByLogits(selector,
                        [&](const reference::KeyValues& kv, const std::vector<double>& q) {
                          return reference::Logits(kv, q, spec_.softmax_scale, kTokens);
                        });
    }
  }

 private:
  std::vector<double> GroupQuery(int g) const { return QueryOf(kv_head_ * spec_.group() + g); }

  template <typename F>
  Ranked ByLogits(Selector selector, const F& logits_of) const {
    const reference::KeyValues kv = context_.Head(kv_head_);
    Ranked ranked;
    for (int g = 0; g < spec_.group(); ++g) ranked.logits.push_back(logits_of(kv, GroupQuery(g)));
    ranked.bins = GroupBins(selector, ranked.logits);
    return ranked;
  }

  Ranked ByAsymmetric() const {
    const reference::KeyValues kv = context_.Head(kv_head_);
    const int bits = spec_.hash.bits_per_dim;
    const std::vector<float> rotation = MakeRotation(spec_.head_dim, spec_.hash.seed, 0);
    std::vector<reference::RotationCode> codes;
    for (int64_t t = 0; t < index().closed_token_count(); ++t) {
      codes.push_back(reference::EncodeRotated(kv.Key(t), index().CentreOf(t), rotation, bits));
    }
    Ranked ranked;
    for (int g = 0; g < spec_.group(); ++g) {
      const reference::QuantisedQuery query = reference::QuantiseQuery(GroupQuery(g), rotation);
      EXPECT_GT(query.border_distance, kCoordinateTolerance) << "choose another seed";
      ranked.logits.emplace_back();
      for (size_t t = 0; t < codes.size(); ++t) {
        ranked.logits[g].push_back(
            reference::AsymmetricLogit(codes[t], query, bits, spec_.softmax_scale) +
            spec_.softmax_scale *
                reference::Dot(GroupQuery(g), index().CentreOf(static_cast<int64_t>(t))));
      }
    }
    ranked.bins = GroupBins(Selector::kAsymmetric, ranked.logits);
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
    std::vector<std::vector<double>> keys, queries;
    for (int64_t t = begin(); t < end(); ++t) {
      keys.push_back(reference::Rotated(rotation, index().Centred(kv, t)));
    }
    for (int g = 0; g < spec_.group(); ++g) {
      queries.push_back(reference::Rotated(rotation, GroupQuery(g)));
    }
    return {{}, HammingRanges(keys, queries, 2e-5)};
  }

  // From 4-bit elements of the whole keys, or of their label channels only.
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
    const Selector selector = labels ? Selector::kDoubleSparsity : Selector::kInt4Keys;
    Ranked ranked =
        ByLogits(selector, [&](const reference::KeyValues&, const std::vector<double>& query) {
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
