#include "host/methods/weights/mlp.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <random>

#include "host/methods/weights/index_weights.h"
#include "tests/host/methods/weights/safetensors_file.h"

namespace spillway {
namespace {

using ::testing::HasSubstr;

std::vector<float> Normals(size_t count, double scale, std::mt19937& rng) {
  std::normal_distribution<float> normal(0, static_cast<float>(scale));
  std::vector<float> values(count);
  for (float& x : values) x = normal(rng);
  return values;
}

MlpLayer RandomLayer(int heads, int d, int hidden, int bits, bool residual, bool b2,
                     std::mt19937& rng) {
  const auto size = [](int a, int b, int c) { return static_cast<size_t>(a) * b * c; };
  MlpLayer layer;
  layer.head_dim = d;
  layer.hidden_dim = hidden;
  layer.hash_bits = bits;
  layer.residual = residual;
  layer.w1 = Normals(size(heads, d, hidden), 1 / std::sqrt(d), rng);
  layer.b1 = Normals(size(heads, 1, hidden), 0.5, rng);
  layer.w2 = Normals(size(heads, hidden, bits), 1 / std::sqrt(hidden), rng);
  if (b2) layer.b2 = Normals(size(heads, 1, bits), 0.5, rng);
  return layer;
}

// The output y, in double precision.
std::vector<double> Reference(const MlpLayer& m, int head, const std::vector<float>& x) {
  std::vector<double> z(m.hidden_dim), y(m.hash_bits);
  for (int j = 0; j < m.hidden_dim; ++j) {
    double sum = m.b1[head * m.hidden_dim + j];
    for (int i = 0; i < m.head_dim; ++i) {
      sum += double{x[i]} * m.w1[(head * m.head_dim + i) * m.hidden_dim + j];
    }
    z[j] = sum / (1 + std::exp(-sum)) + (m.residual ? x[j] : 0);
  }
  for (int j = 0; j < m.hash_bits; ++j) {
    double sum = m.b2.empty() ? 0 : m.b2[head * m.hash_bits + j];
    for (int i = 0; i < m.hidden_dim; ++i) {
      sum += z[i] * m.w2[(head * m.hidden_dim + i) * m.hash_bits + j];
    }
    y[j] = sum + (m.residual ? z[j] : 0);
  }
  return y;
}

struct Shape {
  int d, hidden, bits;
  bool residual, b2;
};

class Mlp : public ::testing::TestWithParam<Shape> {};

TEST_P(Mlp, AgreesWithDoublePrecision) {
  const Shape s = GetParam();
  std::mt19937 rng(s.d + s.hidden + s.bits);
  constexpr int kHeads = 3;
  const MlpLayer layer = RandomLayer(kHeads, s.d, s.hidden, s.bits, s.residual, s.b2, rng);
  for (int trial = 0; trial < 30; ++trial) {
    // From tiny to large enough that SiLU saturates on both sides.
    const std::vector<float> x = Normals(s.d, std::pow(10.0, trial % 5 - 2), rng);
    const int head = trial % kHeads;
    const std::vector<double> want = Reference(layer, head, x);
    std::vector<float> y(s.bits, NAN);
    MlpOutput(layer, head, x.data(), y.data());
    std::vector<uint32_t> words(s.bits / 32, 0xdeadbeef);
    MlpCode(layer, head, x.data(), words.data());
    double scale = 1;
    for (const double w : want) scale = std::max(scale, std::abs(w));
    for (int j = 0; j < s.bits; ++j) {
      ASSERT_NEAR(y[j], want[j], 1e-5 * scale) << "trial " << trial << " output " << j;
      const bool bit = words[j / 32] >> (j % 32) & 1;
      ASSERT_EQ(bit, y[j] > 0);
      if (std::abs(want[j]) > 1e-5 * scale) {
        ASSERT_EQ(bit, want[j] > 0) << "output " << j;
      }
    }
  }
}

INSTANTIATE_TEST_SUITE_P(
    Shapes, Mlp,
    ::testing::Values(Shape{128, 128, 128, false, false}, Shape{128, 128, 128, true, true},
                      Shape{64, 64, 64, true, false}, Shape{80, 1, 32, false, true},
                      Shape{96, 37, 1024, false, true}, Shape{256, 4096, 160, false, false},
                      Shape{16, 7, 32, false, false}));

TEST(Mlp, ZeroIsNotPositive) {
  MlpLayer layer;
  layer.head_dim = 16;
  layer.hidden_dim = 4;
  layer.hash_bits = 32;
  layer.w1.resize(64);
  layer.b1.resize(4);
  layer.w2.resize(128);
  const std::vector<float> x(16, 1.0f);
  uint32_t word = ~0u;
  MlpCode(layer, 0, x.data(), &word);
  EXPECT_EQ(word, 0u);
}

TEST(Mlp, SaturatedUnitsStayFinite) {
  std::mt19937 rng(1);
  const MlpLayer layer = RandomLayer(1, 64, 64, 64, true, true, rng);
  const std::vector<float> x = Normals(64, 1e6, rng);
  std::vector<float> y(64);
  MlpOutput(layer, 0, x.data(), y.data());
  for (const float v : y) EXPECT_TRUE(std::isfinite(v));
}

class MlpLoad : public ::testing::Test {
 protected:
  MlpLoad() {
    spec_.layer_count = 2;
    spec_.query_head_count = 4;
    spec_.kv_head_count = 2;
    spec_.head_dim = 16;
    spec_.hash.kind = HashKind::kMlp;
    spec_.hash.hash_bits = 32;
    spec_.hash.hidden_dim = 8;
  }
  // A file with all tensors except `skip`, with `heads` MLPs per layer.
  std::vector<std::byte> File(const std::string& skip, bool b2, int64_t heads = 2) {
    std::mt19937 rng(9);
    SafeTensorsWriter writer;
    for (int l = 0; l < 2; ++l) {
      const std::string prefix = "layers." + std::to_string(l) + ".";
      const auto add = [&](const std::string& name, std::vector<int64_t> shape) {
        size_t count = 1;
        for (const int64_t n : shape) count *= static_cast<size_t>(n);
        if (prefix + name != skip) writer.Add(prefix + name, shape, Normals(count, 1, rng));
      };
      add("w1", {heads, 16, 8});
      add("b1", {heads, 8});
      add("w2", {heads, 8, 32});
      if (b2) add("b2", {heads, 32});
    }
    return writer.File();
  }
  ModelSpec spec_;
};

TEST_F(MlpLoad, ReadsAllLayers) {
  for (const bool b2 : {false, true}) {
    const auto bytes = File("", b2);
    const auto weights = LoadIndexWeights(spec_, bytes);
    ASSERT_TRUE(weights.ok()) << weights.status();
    ASSERT_EQ(weights->mlp.size(), 2u);
    EXPECT_EQ(weights->mlp[1].w1.size(), 2u * 16 * 8);
    EXPECT_EQ(weights->mlp[1].b2.size(), b2 ? 64u : 0u);
    EXPECT_NE(weights->mlp[0].w1, weights->mlp[1].w1);
    EXPECT_EQ(weights->bytes(), 4 * 2 * (256 + 16 + 512 + (b2 ? 64 : 0)));
    EXPECT_EQ(weights->mlp[0].head_dim, 16);
    EXPECT_EQ(weights->mlp[0].hidden_dim, 8);
    EXPECT_EQ(weights->mlp[0].hash_bits, 32);
  }
}

TEST_F(MlpLoad, NamesTheTensorThatIsMissing) {
  for (const char* name :
       {"layers.0.w1", "layers.1.b1", "layers.1.w2", "layers.0.b2", "layers.1.b2"}) {
    const auto bytes = File(name, true);
    const absl::Status status = LoadIndexWeights(spec_, bytes).status();
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
    EXPECT_THAT(std::string(status.message()), HasSubstr(name));
    EXPECT_THAT(std::string(status.message()), HasSubstr("missing"));
  }
}

TEST_F(MlpLoad, NamesTheTensorThatIsMisshapen) {
  spec_.hash.hash_bits = 64;
  const auto bytes = File("", false);
  EXPECT_THAT(std::string(LoadIndexWeights(spec_, bytes).status().message()),
              HasSubstr("\"layers.0.w2\" has shape [2, 8, 32], not [2, 8, 64]"));
}

TEST_F(MlpLoad, ReadsOneForEveryQueryHead) {
  spec_.hash.per_query_head = true;
  const auto weights = LoadIndexWeights(spec_, File("", true, 4));
  ASSERT_TRUE(weights.ok()) << weights.status();
  EXPECT_EQ(weights->mlp[1].w2.size(), 4u * 8 * 32);
  EXPECT_THAT(std::string(LoadIndexWeights(spec_, File("", true, 2)).status().message()),
              HasSubstr("\"layers.0.w1\" has shape [2, 16, 8], not [4, 16, 8]"));
}

}  // namespace
}  // namespace spillway
