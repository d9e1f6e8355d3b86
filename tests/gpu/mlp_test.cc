#include "gpu/methods/mlp.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "host/methods/weights/mlp.h"
#include "tests/gpu/coded_layer.h"

namespace spillway::cuda {
namespace {

struct MlpShape {
  int d, hidden, bits;
  bool residual, b2;
};

class GpuMlp : public ::testing::TestWithParam<MlpShape> {
 protected:
  // exp() differs in the last bits on a GPU, so signs may differ next to zero.
  static constexpr float kNearZero = 1e-3f;

  void SetUp() override { SKIP_WITHOUT_GPU(); }

  // Makes the weights of `heads` heads, on the host and on the GPU.
  MlpWeightsView MakeWeights(int heads, std::mt19937& random) {
    const MlpShape s = GetParam();
    const auto size = [](int a, int b, int c) { return static_cast<size_t>(a) * b * c; };
    mlp_ = {s.d, s.hidden, s.bits, s.residual, {}, {}, {}, {}, {}, {}};
    mlp_.w1 = Normals(size(heads, s.d, s.hidden), 1 / std::sqrt(s.d), random);
    mlp_.b1 = Normals(size(heads, 1, s.hidden), 0.5, random);
    mlp_.w2 = Normals(size(heads, s.hidden, s.bits), 1 / std::sqrt(s.hidden), random);
    if (s.b2) mlp_.b2 = Normals(size(heads, 1, s.bits), 0.5, random);
    w1_ = std::make_unique<DeviceArray<float>>(mlp_.w1);
    b1_ = std::make_unique<DeviceArray<float>>(mlp_.b1);
    w2_ = std::make_unique<DeviceArray<float>>(mlp_.w2);
    b2_ = std::make_unique<DeviceArray<float>>(mlp_.b2);
    return {s.hidden,
            s.bits,
            s.residual,
            w1_->data(),
            b1_->data(),
            w2_->data(),
            s.b2 ? b2_->data() : nullptr};
  }

  // Compares the code of x on the GPU, whose bits are bit(j), with the CPU's.
  template <typename Bit>
  void ExpectCode(int head, const std::vector<float>& x, const Bit& bit) {
    std::vector<float> y(mlp_.hash_bits);
    MlpOutput(mlp_, head, x.data(), y.data());
    for (int j = 0; j < mlp_.hash_bits; ++j) {
      if (std::abs(y[j]) < kNearZero) continue;
      ASSERT_EQ(bit(j), y[j] > 0) << "bit " << j << ", y " << y[j];
    }
  }

  // Compares keys [begin, end) of `heads` KV heads, with `codes` codes each.
  void ExpectKeys(int heads, int codes, DType dtype, int64_t begin, int64_t end, Place rows) {
    SCOPED_TRACE("tokens [" + std::to_string(begin) + ", " + std::to_string(end) + ") of " +
                 std::to_string(heads) + " heads, " + std::to_string(codes) + " codes a key");
    const MlpShape s = GetParam();
    std::mt19937 random(s.d + s.hidden + s.bits);
    const MlpWeightsView weights = MakeWeights(heads * codes, random);
    Layer layer(heads, s.d, dtype, end, CodeTiling{1, codes * s.bits / 32});
    for (int h = 0; h < heads; ++h) {
      const std::vector<float> centre = Normals(s.d, 0.5, random);
      std::copy(centre.begin(), centre.end(), layer.Centre(h));
      for (int64_t t = begin; t < end; ++t) layer.SetKey(h, t, Normals(s.d, 1, random));
    }
    layer.Upload(rows);
    Check(LaunchEncodeMlp(layer.Work(begin, end), weights, nullptr));
    std::vector<std::vector<std::byte>> pages = layer.FetchCodes();
    for (int h = 0; h < heads; ++h) {
      for (int64_t t = begin; t < end; ++t) {
        SCOPED_TRACE("head " + std::to_string(h) + " token " + std::to_string(t));
        std::vector<float> x = layer.Key(h, t);
        for (int i = 0; i < s.d; ++i) x[i] -= layer.Centre(h)[i];
        const TokenCode code(layer.tiling(), pages[h * layer.pages() + t / kPageTokenCount],
                             static_cast<int>(t % kPageTokenCount));
        for (int c = 0; c < codes; ++c) {
          ExpectCode(h * codes + c, x, [&](int j) { return code.Bit(0, c * s.bits + j); });
          if (HasFatalFailure()) return;
        }
      }
    }
    ExpectPoisonOutside(std::move(pages), layer, begin, end);
  }

  void ExpectQueries(int heads, int group) {
    SCOPED_TRACE(std::to_string(heads) + " heads of " + std::to_string(group) + " queries");
    const MlpShape s = GetParam();
    std::mt19937 random(group);
    const MlpWeightsView weights = MakeWeights(heads, random);
    const int count = heads * group, words = s.bits / 32;
    const std::vector<float> x = Normals(static_cast<size_t>(count) * s.d, 1, random);
    const DeviceArray<float> device_x(x);
    // Memory for one more code, which must not be written.
    const DeviceArray<uint32_t> device_bits(
        std::vector<uint32_t>(static_cast<size_t>(count + 1) * words, 0xCDCDCDCDu));
    Check(LaunchMlpCodes(weights, s.d, group, device_x.data(), count, device_bits.data(), nullptr));
    const std::vector<uint32_t> bits = device_bits.Fetch();
    for (int v = 0; v < count; ++v) {
      SCOPED_TRACE("vector " + std::to_string(v));
      ExpectCode(v / group, {x.begin() + v * s.d, x.begin() + (v + 1) * s.d},
                 [&](int j) { return (bits[v * words + j / 32] >> (j % 32) & 1) != 0; });
      if (HasFatalFailure()) return;
    }
    EXPECT_THAT(std::vector<uint32_t>(bits.end() - words, bits.end()),
                ::testing::Each(0xCDCDCDCDu));
  }

  MlpLayer mlp_;
  std::unique_ptr<DeviceArray<float>> w1_, b1_, w2_, b2_;
};

TEST_P(GpuMlp, KeysHaveTheCpusBits) {
  // Few thread blocks, and many: up to 128 blocks of four tokens are few.
  ExpectKeys(2, 1, DType::kBF16, 126, 131, Place::kGpu);
  ExpectKeys(2, 1, DType::kF32, 130, 131, Place::kPinned);
  ExpectKeys(9, 1, DType::kF16, 100, 161, Place::kGpu);
}

TEST_P(GpuMlp, KeysHaveACodeOfEveryMlpOfTheirHead) {
  // As many codes as fit into a plane of 1,024 bits, at most for a group of 16.
  const int codes = std::min(16, 1024 / GetParam().bits);
  ExpectKeys(2, codes, DType::kF32, 126, 131, Place::kPinned);
  ExpectKeys(3, codes, DType::kBF16, 100, 161, Place::kGpu);
}

TEST_P(GpuMlp, QueriesHaveTheCpusBits) {
  ExpectQueries(2, 1);
  ExpectQueries(3, 5);
  ExpectQueries(9, 61);
}

INSTANTIATE_TEST_SUITE_P(
    Shapes, GpuMlp,
    ::testing::Values(MlpShape{128, 128, 128, false, false}, MlpShape{128, 128, 128, true, true},
                      MlpShape{64, 64, 64, true, false}, MlpShape{256, 256, 256, true, true},
                      MlpShape{80, 1, 32, false, true}, MlpShape{96, 37, 1024, false, true},
                      MlpShape{16, 7, 32, false, false}, MlpShape{128, 259, 544, false, true},
                      MlpShape{32, 4096, 160, false, false}));

}  // namespace
}  // namespace spillway::cuda
