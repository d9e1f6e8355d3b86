// What LoadIndexWeights reads in addition to MLPs with one hidden layer.
#include "host/methods/weights/index_weights.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <functional>
#include <random>
#include <string>
#include <vector>

#include "tests/host/methods/weights/safetensors_file.h"
#include "tests/reference/methods.h"

namespace spillway {
namespace {

using ::testing::HasSubstr;

constexpr int kD = 16, kHidden = 8, kBits = 32, kKvHeads = 2, kQueryHeads = 4, kLayers = 2;
const std::vector<int32_t> kChannels = {0, 3, 15, 2, 1, 9, 8, 4, /* the second head's */
                                        7, 6, 5,  4, 3, 2, 1, 0};

// A tensor of the file; the file has them in order.
struct Tensor {
  std::string name;
  std::vector<int64_t> shape;
  std::vector<float> values;
};

class IndexWeightsLoad : public ::testing::Test {
 protected:
  IndexWeightsLoad() {
    spec_.layer_count = kLayers;
    spec_.query_head_count = kQueryHeads;
    spec_.kv_head_count = kKvHeads;
    spec_.head_dim = kD;
    spec_.hash.kind = HashKind::kMlp;
    spec_.hash.hash_bits = kBits;
    spec_.hash.hidden_dim = kHidden;
    spec_.hash.hidden_layer_count = 2;
    spec_.hash.query_weights = true;
    spec_.indices.label_channel_count = 8;
    std::mt19937 random(4);
    std::normal_distribution<float> normal(0, 0.5f);
    for (int l = 0; l < kLayers; ++l) {
      for (const auto& [prefix, heads] :
           {std::pair("", kKvHeads), std::pair("query_", kQueryHeads)}) {
        const std::string at = "layers." + std::to_string(l) + "." + prefix;
        const auto add = [&](const char* name, std::vector<int64_t> shape) {
          int64_t count = 1;
          for (const int64_t n : shape) count *= n;
          std::vector<float> values(count);
          for (float& x : values) x = normal(random);
          tensors_.push_back({at + name, std::move(shape), std::move(values)});
        };
        add("w1", {heads, kD, kHidden});
        add("b1", {heads, kHidden});
        add("w2", {heads, kHidden, kHidden});
        add("b2", {heads, kHidden});
        add("w3", {heads, kHidden, kBits});
        add("b3", {heads, kBits});
      }
    }
  }

  // A file with all tensors. change (may be null) may change a tensor, or return false to leave it
  // out.
  std::vector<std::byte> File(const std::function<bool(Tensor&)>& change = nullptr,
                              const std::vector<int32_t>& channels = kChannels) const {
    SafeTensorsWriter writer;
    for (Tensor tensor : tensors_) {
      if (change == nullptr || change(tensor)) {
        writer.Add(tensor.name, tensor.shape, tensor.values);
      }
    }
    for (int l = 0; l < kLayers; ++l) {
      Tensor tensor{"layers." + std::to_string(l) + ".channels", {kKvHeads, 8}, {}};
      if (change == nullptr || change(tensor)) {
        writer.AddIntegers(tensor.name, tensor.shape, l + 1 == kLayers ? channels : kChannels);
      }
    }
    return writer.File();
  }
  std::string Refused(const std::vector<std::byte>& file) const {
    const absl::Status status = LoadIndexWeights(spec_, file).status();
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
    return std::string(status.message());
  }
  const std::vector<float>& Values(const std::string& name) const {
    for (const Tensor& tensor : tensors_) {
      if (tensor.name == name) return tensor.values;
    }
    ADD_FAILURE() << name;
    return tensors_[0].values;
  }

  ModelSpec spec_;
  std::vector<Tensor> tensors_;
};

TEST_F(IndexWeightsLoad, ReadsAll) {
  const auto weights = LoadIndexWeights(spec_, File());
  ASSERT_TRUE(weights.ok()) << weights.status();
  ASSERT_EQ(weights->mlp.size(), 2u);
  ASSERT_EQ(weights->query_mlp.size(), 2u);
  ASSERT_EQ(weights->channels.size(), 2u);
  EXPECT_EQ(weights->mlp[1].w2, Values("layers.1.w2"));
  EXPECT_EQ(weights->mlp[1].b2, Values("layers.1.b2"));
  EXPECT_EQ(weights->mlp[0].w3, Values("layers.0.w3"));
  EXPECT_EQ(weights->mlp[1].b3, Values("layers.1.b3"));
  EXPECT_EQ(weights->query_mlp[0].w1, Values("layers.0.query_w1"));
  EXPECT_EQ(weights->query_mlp[1].b3, Values("layers.1.query_b3"));
  EXPECT_EQ(weights->channels[1], (std::vector<uint16_t>(kChannels.begin(), kChannels.end())));
  const int64_t mlp =
      kD * kHidden + kHidden + kHidden * kHidden + kHidden + kHidden * kBits + kBits;
  EXPECT_EQ(weights->bytes(), kLayers * (4 * mlp * (kKvHeads + kQueryHeads) + 2 * 16));
}

TEST_F(IndexWeightsLoad, ReadsOnlyWhatTheModelAsksFor) {
  spec_.hash.query_weights = false;
  spec_.indices.label_channel_count = 0;
  const auto mlps = LoadIndexWeights(spec_, File());
  ASSERT_TRUE(mlps.ok()) << mlps.status();
  EXPECT_TRUE(mlps->query_mlp.empty());
  EXPECT_TRUE(mlps->channels.empty());
  spec_.hash.kind = HashKind::kRotation;
  spec_.indices.label_channel_count = 8;
  const auto channels =
      LoadIndexWeights(spec_, File([](Tensor& t) { return t.name.ends_with("channels"); }));
  ASSERT_TRUE(channels.ok()) << channels.status();
  EXPECT_TRUE(channels->mlp.empty());
  EXPECT_EQ(channels->channels.size(), 2u);
}

TEST_F(IndexWeightsLoad, TheDeepMlpAgreesWithDoublePrecision) {
  const auto weights = LoadIndexWeights(spec_, File());
  ASSERT_TRUE(weights.ok()) << weights.status();
  std::mt19937 random(5);
  std::normal_distribution<float> normal;
  for (int trial = 0; trial < 40; ++trial) {
    const int head = trial % kQueryHeads;
    reference::HashMlp mlp;
    for (const auto& [n, in, out] :
         {std::tuple("1", kD, kHidden), std::tuple("2", kHidden, kHidden),
          std::tuple("3", kHidden, kBits)}) {
      const std::vector<float>& w = Values(std::string("layers.1.query_w") + n);
      const std::vector<float>& b = Values(std::string("layers.1.query_b") + n);
      mlp.layers.push_back({{w.begin() + head * in * out, w.begin() + (head + 1) * in * out},
                            {b.begin() + head * out, b.begin() + (head + 1) * out}});
    }
    std::vector<float> x(kD), y(kBits);
    for (float& e : x) e = std::pow(10.0f, static_cast<float>(trial % 4 - 1)) * normal(random);
    MlpOutput(weights->query_mlp[1], head, x.data(), y.data());
    const std::vector<double> wanted = mlp.Output(std::vector<double>(x.begin(), x.end()));
    double scale = 1;
    for (const double w : wanted) scale = std::max(scale, std::fabs(w));
    for (int j = 0; j < kBits; ++j) ASSERT_NEAR(y[j], wanted[j], 1e-5 * scale) << trial;
  }
}

TEST_F(IndexWeightsLoad, NamesTheTensorThatIsMissing) {
  for (const char* name :
       {"layers.0.b2", "layers.1.w3", "layers.0.b3", "layers.1.query_w1", "layers.0.query_b2",
        "layers.1.query_w3", "layers.1.query_b3", "layers.0.channels", "layers.1.channels"}) {
    const std::string message = Refused(File([&](Tensor& t) { return t.name != name; }));
    EXPECT_THAT(message, HasSubstr(std::string("\"") + name + "\" is missing"));
  }
}

TEST_F(IndexWeightsLoad, NamesTheTensorThatIsMisshapen) {
  const std::pair<const char*, const char*> cases[] = {
      {"layers.1.w2", "has shape [2, 64], not [2, 8, 8]"},
      {"layers.0.b2", "has shape [2, 8, 1], not [2, 8]"},
      {"layers.1.w3", "has shape [2, 8, 32, 1], not [2, 8, 32]"},
      {"layers.0.query_w1", "has shape [4, 16, 8, 1], not [4, 16, 8]"},
      {"layers.1.query_b3", "has shape [4, 32, 1], not [4, 32]"},
      {"layers.1.channels", "has shape [2, 8, 1], not [2, 8]"}};
  for (const auto& [name, wanted] : cases) {
    const std::string message = Refused(File([&, name = name](Tensor& t) {
      if (t.name != name) return true;
      if (t.name == "layers.1.w2") {
        t.shape = {2, 64};
      } else {
        t.shape.push_back(1);
      }
      return true;
    }));
    EXPECT_THAT(message, HasSubstr(name));
    EXPECT_THAT(message, HasSubstr(wanted));
  }
  // With an MLP per query head, the keys' weights must have as many MLPs.
  spec_.hash.per_query_head = true;
  EXPECT_THAT(Refused(File()), HasSubstr("\"layers.0.w1\" has shape [2, 16, 8], not [4, 16, 8]"));
}

TEST_F(IndexWeightsLoad, NamesTheChannelThatIsOutOfRangeOrRepeated) {
  for (const auto& [at, value, head] : {std::tuple(0, 16, 0), std::tuple(3, -1, 0),
                                        std::tuple(15, 7, 1), std::tuple(9, 65536, 1)}) {
    std::vector<int32_t> channels = kChannels;
    channels[at] = value;
    const std::string message = Refused(File(nullptr, channels));
    EXPECT_THAT(message, HasSubstr("\"layers.1.channels\" has channel " + std::to_string(value) +
                                   " for KV head " + std::to_string(head)));
    EXPECT_THAT(message, HasSubstr("[0, 16)"));
  }
}

TEST_F(IndexWeightsLoad, ChannelsAreIntegersOfEitherWidth) {
  spec_.hash.kind = HashKind::kNone;
  const auto file = [](const auto& channels) {
    SafeTensorsWriter writer;
    for (int l = 0; l < kLayers; ++l) {
      writer.AddIntegers("layers." + std::to_string(l) + ".channels", {kKvHeads, 8}, channels);
    }
    return writer.File();
  };
  const auto weights =
      LoadIndexWeights(spec_, file(std::vector<int64_t>(kChannels.begin(), kChannels.end())));
  ASSERT_TRUE(weights.ok()) << weights.status();
  EXPECT_EQ(weights->channels[0], (std::vector<uint16_t>(kChannels.begin(), kChannels.end())));
  SafeTensorsWriter floats;
  floats.Add("layers.0.channels", {kKvHeads, 8}, {kChannels.begin(), kChannels.end()});
  EXPECT_THAT(Refused(floats.File()),
              HasSubstr("\"layers.0.channels\" has dtype F32, not I32 or I64"));
  std::vector<int64_t> huge(kChannels.begin(), kChannels.end());
  huge[4] = (int64_t{1} << 32) + 1;  // 1 if cut to 32 bits
  EXPECT_THAT(Refused(file(huge)), HasSubstr("has channel 4294967297"));
}

// The weights of MLPs must not be integers.
TEST_F(IndexWeightsLoad, MlpsAreOfFloats) {
  SafeTensorsWriter writer;
  writer.AddIntegers("layers.0.w1", {kKvHeads, kD, kHidden},
                     std::vector<int32_t>(kKvHeads * kD * kHidden));
  EXPECT_THAT(Refused(writer.File()), HasSubstr("has dtype I32, not F32, F16 or BF16"));
}

}  // namespace
}  // namespace spillway
