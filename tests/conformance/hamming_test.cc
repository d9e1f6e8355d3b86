// The heavy sets of the hamming selector equal those of its definition, recomputed in fp64.
#include <gtest/gtest.h>

#include <cmath>
#include <random>
#include <string>
#include <vector>

#include "host/codes/rotation.h"
#include "tests/conformance/heavy_fixture.h"
#include "tests/host/methods/weights/safetensors_file.h"
#include "tests/reference/codes.h"

namespace spillway {
namespace {

using reference::BinRange;

constexpr int kGroup = 3;

class Hamming : public HeavyTest {};

TEST_P(Hamming, ByRotation) {
  for (const auto& [d, bits] : {std::pair(64, 1), std::pair(80, 2), std::pair(128, 2)}) {
    Prepare(MakeSpec(1, kGroup, d, DType::kBF16,
                     {.kind = HashKind::kRotation, .bits_per_dim = bits, .seed = 6}));
    policy_.selector = Selector::kHamming;
    const reference::KeyValues kv = context_.Head(0);
    const std::vector<float> rotation = MakeRotation(d, 6, 0);
    std::vector<std::vector<double>> keys, queries;
    for (int64_t t = begin(); t < end(); ++t) {
      keys.push_back(reference::Rotated(rotation, index().Centred(kv, t)));
    }
    for (int g = 0; g < kGroup; ++g) queries.push_back(reference::Rotated(rotation, QueryOf(g)));
    ExpectTopK(HammingRanges(keys, queries, 2e-5), "hamming d " + std::to_string(d));
  }
}

// The hash MLPs of one layer, computed in fp64.
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
  // The output y of MLP number `mlp`.
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

TEST_P(Hamming, ByMlp) {
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
                      .raw_keys = raw_keys,
                      .hash_bits = bits,
                      .hidden_dim = kHidden,
                      .per_query_head = per_query_head}),
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

INSTANTIATE_TEST_SUITE_P(Devices, Hamming, ::testing::ValuesIn(DeviceFactories()),
                         [](const auto& info) { return info.param.name; });

}  // namespace
}  // namespace spillway
