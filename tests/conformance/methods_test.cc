// The selectors of the optional methods choose the heavy sets that their published formulas give,
// recomputed in fp64.
#include <gtest/gtest.h>

#include <random>
#include <string>
#include <vector>

#include "tests/conformance/methods_fixture.h"

namespace spillway {
namespace {

using reference::BinRange;

class Methods : public MethodsTest {
 protected:
  // Checks the sets by count, fraction and mass of every KV head.
  void ExpectSets(Selector selector, const std::string& what) {
    policy_.selector = selector;
    ASSERT_TRUE(Validate(policy_, spec_).empty()) << what;
    for (kv_head_ = 0; kv_head_ < spec_.kv_head_count; ++kv_head_) {
      const std::string where = what + " KV head " + std::to_string(kv_head_);
      const Ranked ranked = RankedBy(selector);
      ExpectTopK(ranked.bins, where);
      if (!ranked.logits.empty()) ExpectTopP(ranked.logits, where);
    }
  }
};

struct Shape {
  int kv_heads, group, d;
  DType dtype;
};

std::string Name(const Shape& s) {
  return std::string(DTypeName(s.dtype)) + " d " + std::to_string(s.d) + " G " +
         std::to_string(s.group);
}

constexpr Shape kShapes[] = {{2, 1, 64, DType::kF32},
                             {1, 2, 80, DType::kF16},
                             {2, 3, 128, DType::kBF16},
                             {1, 4, 256, DType::kBF16},
                             {1, 7, 64, DType::kF16}};

TEST_P(Methods, Int4Keys) {
  for (const Shape& s : kShapes) {
    Prepare(IndexedModel(s.kv_heads, s.group, s.d, s.dtype, {.int4_keys = true}));
    ExpectSets(Selector::kInt4Keys, "int4 keys " + Name(s));
  }
}

// A model without codes uses the index that it has.
TEST_P(Methods, Int4KeysWithoutCodes) {
  Prepare(IndexedModel(1, 2, 64, DType::kBF16, {.int4_keys = true}, {.kind = HashKind::kNone}));
  EXPECT_EQ(policy_.selector, Selector::kInt4Keys);
  ExpectSets(Selector::kInt4Keys, "int4 keys without codes");
}

TEST_P(Methods, Quest) {
  for (const Shape& s : kShapes) {
    for (const int page : {16, 32, 64, 128}) {
      if (page != 16 && s.d != 128) continue;
      Prepare(IndexedModel(s.kv_heads, s.group, s.d, s.dtype, {.quest_page_token_count = page}));
      open_max_ = 2 * page;  // a whole page may be undecided
      ExpectSets(Selector::kQuest, "quest " + std::to_string(page) + " " + Name(s));
    }
  }
}

TEST_P(Methods, DoubleSparsity) {
  for (const Shape& s : kShapes) {
    for (const int channels : {8, s.d == 64 ? 64 : s.d / 16 * 8}) {
      Prepare(IndexedModel(s.kv_heads, s.group, s.d, s.dtype, {.label_channel_count = channels}));
      ExpectSets(Selector::kDoubleSparsity,
                 "double sparsity " + std::to_string(channels) + " " + Name(s));
    }
  }
}

// With all indices in one model, each selector finds its own.
TEST_P(Methods, EveryIndexAtOnce) {
  Prepare(IndexedModel(2, 2, 96, DType::kBF16, EveryIndex()));
  open_max_ = 2 * 32;
  for (const Selector selector : {Selector::kAsymmetric, Selector::kHamming, Selector::kInt4Keys,
                                  Selector::kQuest, Selector::kDoubleSparsity, Selector::kOracle}) {
    policy_.heavy_kind = HeavyKind::kCount;
    ExpectSets(selector, "selector " + std::to_string(static_cast<int>(selector)));
  }
}

TEST_P(Methods, RotationOfRawKeys) {
  for (const Selector selector : {Selector::kAsymmetric, Selector::kHamming}) {
    Prepare(IndexedModel(2, 3, 64, DType::kBF16, {},
                         {.kind = HashKind::kRotation, .raw_keys = true, .seed = 5}));
    ExpectSets(selector, "raw keys");
  }
}

// The MLPs for the keys, or for the queries, of one layer.
class Mlps {
 public:
  Mlps(int count, const ModelSpec& spec, uint32_t seed) : spec_(spec) {
    std::mt19937 random(seed);
    std::normal_distribution<float> normal(0, 0.3f);
    for (int m = 0; m < count; ++m) {
      reference::HashMlp& mlp = mlps_.emplace_back();
      int in = spec.head_dim;
      for (int l = 0; l <= spec.hash.hidden_layer_count; ++l) {
        const int out = Width(l);
        mlp.layers.push_back({std::vector<float>(in * out), std::vector<float>(out)});
        for (float& w : mlp.layers[l].weights) w = normal(random);
        for (float& b : mlp.layers[l].bias) b = normal(random);
        in = out;
      }
    }
  }

  void Write(const std::string& prefix, SafeTensorsWriter& writer) const {
    int64_t in = spec_.head_dim;
    for (int l = 0; l <= spec_.hash.hidden_layer_count; ++l) {
      std::vector<float> weights, bias;
      for (const reference::HashMlp& mlp : mlps_) {
        const reference::HashMlp::Layer& layer = mlp.layers[l];
        weights.insert(weights.end(), layer.weights.begin(), layer.weights.end());
        bias.insert(bias.end(), layer.bias.begin(), layer.bias.end());
      }
      const auto count = static_cast<int64_t>(mlps_.size());
      const std::string name = "layers.0." + prefix;
      writer.Add(name + "w" + std::to_string(l + 1), {count, in, Width(l)}, weights);
      writer.Add(name + "b" + std::to_string(l + 1), {count, Width(l)}, bias);
      in = Width(l);
    }
  }
  const reference::HashMlp& operator[](int i) const { return mlps_[i]; }

 private:
  int Width(int layer) const {
    return layer < spec_.hash.hidden_layer_count ? spec_.hash.hidden_dim : spec_.hash.hash_bits;
  }
  const ModelSpec spec_;
  std::vector<reference::HashMlp> mlps_;
};

// The first case is HashAttention's: MLPs per query head, raw keys, 32 bits.
TEST_P(Methods, DeepMlpsAndThoseOfQueries) {
  struct Case {
    int group, bits, hidden_layers;
    bool per_query_head, query_weights, raw_keys;
  };
  constexpr int kD = 64, kHidden = 40, kKvHeads = 2;
  for (const Case& c : {Case{4, 32, 2, true, true, true}, Case{3, 96, 2, false, true, false},
                        Case{2, 64, 1, false, true, true}, Case{3, 128, 2, true, false, false},
                        Case{1, 32, 2, false, false, true}, Case{2, 64, 1, true, true, false}}) {
    const ModelSpec spec = MakeSpec(kKvHeads, c.group, kD, DType::kF32,
                                    {.kind = HashKind::kMlp,
                                     .raw_keys = c.raw_keys,
                                     .hash_bits = c.bits,
                                     .hidden_dim = kHidden,
                                     .hidden_layer_count = c.hidden_layers,
                                     .per_query_head = c.per_query_head,
                                     .query_weights = c.query_weights});
    const Mlps of_keys(spec.mlp_count(), spec, 8);
    const Mlps of_queries(spec.query_head_count, spec, 9);
    SafeTensorsWriter writer;
    of_keys.Write("", writer);
    if (c.query_weights) of_queries.Write("query_", writer);
    HeavyTest::Prepare(spec, writer.File());
    for (kv_head_ = 0; kv_head_ < kKvHeads; ++kv_head_) {
      const reference::KeyValues kv = context_.Head(kv_head_);
      const std::vector<double> centre =
          c.raw_keys ? std::vector<double>(kD, 0.0) : reference::KeyCentre(kv);
      std::vector<BinRange> bins(end() - begin());
      for (int q = kv_head_ * c.group; q < (kv_head_ + 1) * c.group; ++q) {
        const int mlp = c.per_query_head ? q : kv_head_;
        std::vector<std::vector<double>> keys;
        for (int64_t t = begin(); t < end(); ++t) {
          std::vector<double> x(kv.Key(t).begin(), kv.Key(t).end());
          for (int i = 0; i < kD; ++i) x[i] -= centre[i];
          keys.push_back(of_keys[mlp].Output(x));
        }
        const std::vector<double> query =
            c.query_weights ? of_queries[q].Output(QueryOf(q)) : of_keys[mlp].Output(QueryOf(q));
        const std::vector<BinRange> of_head = HammingRanges(keys, {query}, 5e-5);
        for (size_t i = 0; i < bins.size(); ++i) {
          bins[i].low += of_head[i].low;
          bins[i].high += of_head[i].high;
        }
      }
      ExpectTopK(bins, std::to_string(c.hidden_layers) + " hidden layers, group " +
                           std::to_string(c.group) + " KV head " + std::to_string(kv_head_));
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Devices, Methods, ::testing::ValuesIn(DeviceFactories()),
                         [](const auto& info) { return info.param.name; });

}  // namespace
}  // namespace spillway
