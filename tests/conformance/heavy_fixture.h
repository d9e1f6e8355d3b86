// Compares the heavy set of a sequence with one that is recomputed in fp64.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <functional>
#include <memory>
#include <set>
#include <string>
#include <tuple>
#include <vector>

#include "tests/conformance/device_bench.h"
#include "tests/conformance/scored_end.h"
#include "tests/reference/int8_rows.h"
#include "tests/reference/page_index.h"
#include "tests/reference/ranking.h"

namespace spillway {

// Ranges of the number of matching bits, which are the signs of the outputs. An output closer to
// zero than the tolerance may have either sign.
inline std::vector<reference::BinRange> HammingRanges(
    const std::vector<std::vector<double>>& keys, const std::vector<std::vector<double>>& queries,
    double tolerance) {
  std::vector<reference::BinRange> bins;
  for (const std::vector<double>& key : keys) {
    reference::BinRange range;
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

class HeavyTest : public ::testing::TestWithParam<DeviceFactory> {
 protected:
  static constexpr int64_t kTokens = 6000;
  // Tolerances of fp32 against fp64. If a score is closer than this to a bin's border, or a
  // coordinate to a quantiser's, either side is right.
  static constexpr double kScoreTolerance = 1e-4;
  static constexpr double kCoordinateTolerance = 1e-5;
  // Any bin except that of the strays.
  static constexpr reference::BinRange kAnyBin = {0, 4094};

  // change: applied to the context before it is appended. context_ is that of the stored rows.
  void Prepare(const ModelSpec& spec, std::span<const std::byte> safetensors = {},
               const std::function<void(reference::Context&)>& change = {}) {
    sequence_.reset();
    kv_head_ = 0;
    spec_ = spec;
    bench_ = std::make_unique<DeviceBench>(GetParam(), spec, 0, safetensors);
    context_ = reference::TraceContext(spec, kTokens, 71);
    q_ = reference::TraceQueries(context_, 1, 72, 1.5);
    if (change) change(context_);
    sequence_ = std::make_unique<BenchSequence>(*bench_);
    ASSERT_TRUE(sequence_->Append(context_, 0, kTokens).ok());
    context_ = reference::Stored(std::move(context_));
    indices_.clear();
    for (int h = 0; h < spec.kv_head_count && spec.hash.kind == HashKind::kRotation; ++h) {
      indices_.push_back(reference::PageIndex::Of(context_.Head(h), spec.hash.raw_keys));
      ASSERT_GT(indices_.back().margin, 1e-6) << "choose another seed";
    }
    open_max_ = 0;
    policy_ = DefaultPolicy(spec);
    policy_.tail = Tail::kNone;
  }

  int64_t begin() const { return policy_.sink_token_count; }
  int64_t end() const { return ScoredEnd(spec_, policy_, kTokens); }
  // The page index of KV head kv_head_. Only for models with a rotation.
  const reference::PageIndex& index() const { return indices_[kv_head_]; }
  // Whether the bins of a selector come from scores times the distances of the values.
  bool Weighs(Selector selector) const {
    return spec_.hash.kind == HashKind::kRotation &&
           (selector == Selector::kAsymmetric || selector == Selector::kOracle);
  }
  // The strays among the scored tokens. They are heavy whatever the count.
  std::vector<int64_t> Strays() const {
    std::vector<int64_t> strays;
    for (int64_t t = begin(); Weighs(policy_.selector) && t < end(); ++t) {
      if (index().strays[t]) strays.push_back(t);
    }
    return strays;
  }
  // Tokens that do not count for the reference of the estimates.
  std::vector<bool> LeftOut(Selector selector) const {
    return selector == Selector::kAsymmetric ? index().strays : std::vector<bool>();
  }
  // Logits of the centres of all pages, [G][pages]. Empty if the selector does not use centres.
  std::vector<std::vector<double>> CentreLogits(Selector selector) const {
    std::vector<std::vector<double>> logits;
    for (int g = 0; g < spec_.group() && selector == Selector::kAsymmetric; ++g) {
      logits.emplace_back();
      for (int64_t t = 0; t < index().closed_token_count(); t += kPageTokenCount) {
        logits[g].push_back(
            spec_.softmax_scale *
            reference::Dot(QueryOf(kv_head_ * spec_.group() + g), index().CentreOf(t)));
      }
    }
    return logits;
  }
  std::vector<double> QueryOf(int g) const { return reference::Query(spec_, q_, 0, g); }

  std::set<int64_t> DeviceSet() {
    const JobItem item = sequence_->Select(policy_, q_);
    EXPECT_TRUE(item.status.ok()) << item.status;
    std::set<int64_t> set;
    const Selection& s = item.result.selections[kv_head_];
    for (size_t i = 0; i < s.indices.size(); ++i) {
      if (s.strata[i] == kStratumHeavy) set.insert(s.indices[i]);
    }
    return set;
  }

  // bins: one per scored token, from begin() on.
  void ExpectTopK(const std::vector<reference::BinRange>& bins, const std::string& what) {
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

  // Strays, which are all in bin 4095, are heavy in addition to the count.
  void ExpectSet(const std::vector<reference::BinRange>& bins, int64_t count,
                 const std::string& what) {
    const auto strays = [&](int reference::BinRange::*end) {
      return std::count_if(bins.begin(), bins.end(),
                           [&](const reference::BinRange& range) { return range.*end == 4095; });
    };
    const std::set<int64_t> got = DeviceSet();
    const auto k = static_cast<int64_t>(got.size());
    EXPECT_GE(k, count + strays(&reference::BinRange::low)) << what;
    EXPECT_LE(k, count + strays(&reference::BinRange::high)) << what;
    const std::vector<reference::Membership> wanted = reference::TopK(bins, k);
    int64_t open = 0;
    for (size_t i = 0; i < wanted.size(); ++i) {
      const bool in = got.count(begin() + static_cast<int64_t>(i)) > 0;
      if (wanted[i] == reference::Membership::kOpen) {
        ++open;
      } else {
        ASSERT_EQ(in, wanted[i] == reference::Membership::kIn) << what << " token " << begin() + i;
      }
    }
    // About one token in a hundred may be undecided.
    EXPECT_LT(open, static_cast<int64_t>(bins.size() / 50 + open_max_) + k / 10) << what;
  }

  // Each head's set by mass; their union is heavy. Tokens that fp32 may place in another bin can
  // move a head's threshold, so the size of the difference is limited. candidates: the tokens that
  // a first selection found, from begin() on; empty: all.
  void ExpectTopP(const std::vector<std::vector<double>>& logits, const std::string& what,
                  const std::vector<bool>& candidates = {}) {
    policy_.heavy_kind = HeavyKind::kMass;
    for (const auto& [mass, floor, ceiling] :
         {std::tuple(0.5, 64, 4096), std::tuple(0.2, 1, 4096), std::tuple(0.9, 64, 100),
          std::tuple(0.01, 500, 600)}) {
      policy_.heavy_mass = mass;
      policy_.heavy_floor = floor;
      policy_.heavy_ceiling = ceiling;
      std::set<int64_t> wanted;
      const std::vector<std::vector<double>> centres = CentreLogits(policy_.selector);
      for (size_t g = 0; g < logits.size(); ++g) {
        std::vector<int> bins;
        for (double s : reference::HeadScores(
                 logits[g], begin(), end(), LeftOut(policy_.selector),
                 centres.empty() ? std::span<const double>() : std::span(centres[g]))) {
          bins.push_back(reference::ScoreBin(s));
        }
        // Strays, and tokens that were not found first, have no mass.
        for (const int64_t t : Strays()) bins[t - begin()] = 0;
        for (size_t i = 0; i < candidates.size(); ++i) {
          if (!candidates[i]) bins[i] = 0;
        }
        for (int64_t i : reference::ExactTopP(bins, mass, floor, ceiling)) {
          wanted.insert(begin() + i);
        }
      }
      for (const int64_t t : Strays()) {
        if (candidates.empty() || candidates[t - begin()]) wanted.insert(t);
      }
      const std::set<int64_t> got = DeviceSet();
      std::vector<int64_t> difference;
      std::set_symmetric_difference(got.begin(), got.end(), wanted.begin(), wanted.end(),
                                    std::back_inserter(difference));
      EXPECT_LE(difference.size(), 2 + wanted.size() / 100 + open_max_)
          << what << " mass " << mass << " wanted " << wanted.size() << " got " << got.size();
    }
  }

  // The bins of a selector for the group, from logits [G][tokens].
  std::vector<reference::BinRange> GroupBins(Selector selector,
                                             const std::vector<std::vector<double>>& logits) const {
    std::vector<reference::BinRange> bins;
    for (double s : reference::GroupScores(logits, begin(), end(), LeftOut(selector),
                                           CentreLogits(selector))) {
      bins.push_back(reference::RangeOf(s, kScoreTolerance));
      const int64_t token = begin() + static_cast<int64_t>(bins.size()) - 1;
      if (Weighs(selector)) bins.back() = index().Weigh(bins.back(), token);
    }
    return bins;
  }

  int kv_head_ = 0;      // the KV head whose set is compared
  size_t open_max_ = 0;  // number of undecided tokens allowed in addition to the expected few
  ModelSpec spec_;
  std::unique_ptr<DeviceBench> bench_;
  reference::Context context_;
  std::vector<float> q_;
  std::unique_ptr<BenchSequence> sequence_;
  Policy policy_;

 private:
  std::vector<reference::PageIndex> indices_;  // per KV head
};

}  // namespace spillway
