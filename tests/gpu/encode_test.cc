#include "gpu/kernels/encode.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <memory>
#include <numeric>
#include <random>
#include <string>
#include <tuple>
#include <vector>

#include "host/cpu/kernels.h"
#include "tests/gpu/coded_layer.h"
#include "tests/host/cpu/code_page.h"

namespace spillway::cuda {
namespace {

constexpr int kHeads = 2;
constexpr int64_t kTokens = 300;

// head_dim, bits per dimension, dtype.
class GpuEncode : public ::testing::TestWithParam<std::tuple<int, int, DType>> {
 protected:
  void SetUp() override {
    SKIP_WITHOUT_GPU();
    encoder_ = std::make_unique<Encoder>(d_, bits_, 42);
    layer_ = std::make_unique<Layer>(kHeads, d_, dtype_, kTokens,
                                     CodeTiling{bits_, (d_ + 31) / 32, true});
    std::mt19937 random(d_ * 8 + bits_);
    for (int64_t t = 0; t < kTokens; ++t) {
      for (int h = 0; h < kHeads; ++h) layer_->SetKey(h, t, Normals(d_, 1, random));
    }
    // Head 0's centre is a key, so that others can lie on it; head 1 has none,
    // so that its keys can lie as near to it as the dtype has it.
    const std::vector<float> centre = layer_->Key(0, 20);
    std::copy(centre.begin(), centre.end(), layer_->Centre(0));
    const float huge = dtype_ == DType::kF16 ? 6.0e4f : 1.0e38f;
    const float tiny = dtype_ == DType::kF16 ? 6.0e-8f : 1.0e-40f;
    layer_->SetKey(0, 130, centre);
    layer_->SetKey(0, 131, Normals(d_, huge / 8, random));
    layer_->SetKey(0, 132, std::vector<float>(d_, huge));
    layer_->SetKey(1, 0, std::vector<float>(d_, 0.0f));
    layer_->SetKey(1, 133, std::vector<float>(d_, 0.0f));
    layer_->SetKey(1, 134, Normals(d_, tiny * 4, random));
    std::vector<float> one(d_, 0.0f);
    one[d_ - 1] = -tiny;
    layer_->SetKey(1, 135, one);
    one[0] = huge;
    layer_->SetKey(1, 299, one);
    transposed_ = std::make_unique<DeviceArray<float>>(encoder_->transposed);
  }

  // The CPU's codes of one head's page.
  CodePage OnCpu(int head, int64_t page) {
    CodePage codes(encoder_->params.layout);
    encoder_->params.centre = layer_->Centre(head);
    for (int64_t t = page * kPageTokenCount; t < std::min(kTokens, (page + 1) * kPageTokenCount);
         ++t) {
      EncodeKey(encoder_->params, dtype_, layer_->Row(head, t), codes.data(),
                static_cast<int>(t % kPageTokenCount));
    }
    return codes;
  }

  void ExpectSameAsCpu(int64_t begin, int64_t end, Place rows) {
    layer_->Upload(rows);
    Check(LaunchEncodeRotation(layer_->Work(begin, end), {bits_, transposed_->data()}, nullptr));
    ExpectCpusCodes(begin, end);
  }

  // As a step's append does it.
  void ExpectStepSameAsCpu(int64_t begin, int64_t end, Place rows) {
    layer_->Upload(rows);
    const std::vector<AppendedKey> keys = layer_->Keys(begin, end, transposed_->data());
    const DeviceArray<AppendedKey> list(keys, Place::kPinned);
    // A row copied to a second place, another left alone; one of two slots set.
    const auto row_bytes = static_cast<size_t>(layer_->row_bytes());
    const DeviceArray<std::byte> target(std::vector<std::byte>(2 * row_bytes, kPoison));
    const DeviceArray<uint64_t> slots(std::vector<uint64_t>{7, 7});
    const DeviceArray<RowCopy> copies({{keys[0].row, target.data()}, {keys[0].row, nullptr}},
                                      Place::kPinned);
    const DeviceArray<TableUpdate> updates({{slots.data(), 9}, {nullptr, 9}}, Place::kPinned);
    const DeviceArray<AppendCounts> counts({{1, 1}}, Place::kPinned);
    StepAppend step;
    step.dtype = dtype_;
    step.head_dim = d_;
    step.row_bytes = layer_->row_bytes();
    step.tiling = layer_->tiling();
    step.bits_per_dim = bits_;
    step.keys = list.data();
    step.key_count = static_cast<int>(keys.size());
    step.updates = updates.data();
    step.copies = copies.data();
    step.counts = counts.data();
    Check(LaunchStepAppend(step, nullptr));
    ExpectCpusCodes(begin, end);
    const std::vector<std::byte> copied = target.Fetch();
    EXPECT_EQ(std::memcmp(copied.data(), layer_->Row(0, begin), row_bytes), 0);
    EXPECT_TRUE(std::all_of(copied.begin() + static_cast<ptrdiff_t>(row_bytes), copied.end(),
                            [](std::byte b) { return b == kPoison; }));
    EXPECT_EQ(slots.Fetch(), (std::vector<uint64_t>{9, 7}));
  }

  void ExpectCpusCodes(int64_t begin, int64_t end) {
    SCOPED_TRACE("tokens [" + std::to_string(begin) + ", " + std::to_string(end) + ")");
    std::vector<std::vector<std::byte>> pages = layer_->FetchCodes();
    for (int h = 0; h < kHeads; ++h) {
      for (int64_t p = 0; p < layer_->pages(); ++p) {
        CodePage wanted = OnCpu(h, p);
        const auto* factors = reinterpret_cast<const uint16_t*>(
            wanted.data() + encoder_->params.layout.factor_offset_bytes());
        for (int slot = 0; slot < kPageTokenCount; ++slot) {
          const int64_t t = p * kPageTokenCount + slot;
          if (t < begin || t >= end) continue;
          const TokenCode code(layer_->tiling(), pages[h * layer_->pages() + p], slot);
          for (int j = 0; j < layer_->tiling().words * 32; ++j) {
            ASSERT_EQ(code.Level(j), wanted.Level(slot, j))
                << "head " << h << " token " << t << " dimension " << j;
          }
          ASSERT_EQ(code.Factor(), factors[slot]) << "head " << h << " token " << t;
        }
      }
    }
    ExpectPoisonOutside(std::move(pages), *layer_, begin, end);
  }

  const int d_ = std::get<0>(GetParam());
  const int bits_ = std::get<1>(GetParam());
  const DType dtype_ = std::get<2>(GetParam());
  std::unique_ptr<Encoder> encoder_;
  std::unique_ptr<Layer> layer_;
  std::unique_ptr<DeviceArray<float>> transposed_;
};

TEST_P(GpuEncode, ManyTokensHaveTheCpusCodes) {
  ExpectSameAsCpu(0, kTokens, Place::kGpu);
  ExpectSameAsCpu(5, 295, Place::kPinned);
  ExpectSameAsCpu(64, 128, Place::kGpu);
  ExpectSameAsCpu(63, 193, Place::kGpu);
  ExpectSameAsCpu(120, 137, Place::kGpu);
}

TEST_P(GpuEncode, FewTokensHaveTheCpusCodes) {
  ExpectSameAsCpu(0, 1, Place::kGpu);
  ExpectSameAsCpu(299, 300, Place::kPinned);
  ExpectSameAsCpu(17, 17, Place::kGpu);
}

TEST_P(GpuEncode, AStepHasTheCpusCodes) {
  ExpectStepSameAsCpu(0, 1, Place::kGpu);
  ExpectStepSameAsCpu(123, 139, Place::kGpu);
  ExpectStepSameAsCpu(130, 136, Place::kPinned);
  ExpectStepSameAsCpu(299, 300, Place::kPinned);
}

INSTANTIATE_TEST_SUITE_P(Shapes, GpuEncode,
                         ::testing::Combine(::testing::Values(16, 64, 80, 96, 128, 144, 256),
                                            ::testing::Values(1, 2, 3, 4),
                                            ::testing::Values(DType::kF32, DType::kF16,
                                                              DType::kBF16)),
                         [](const auto& info) {
                           return "d" + std::to_string(std::get<0>(info.param)) + "b" +
                                  std::to_string(std::get<1>(info.param)) +
                                  std::string(DTypeName(std::get<2>(info.param)));
                         });

TEST(GpuCentre, IsTheDoubleSumInTokenOrder) {
  SKIP_WITHOUT_GPU();
  constexpr int64_t kRows = 1100;
  for (const int d : {16, 80, 128, 256}) {
    for (const DType dtype : {DType::kF32, DType::kF16, DType::kBF16}) {
      Layer layer(kHeads, d, dtype, kRows, CodeTiling{1, (d + 31) / 32, true});
      std::mt19937 random(d);
      for (int h = 0; h < kHeads; ++h) {
        for (int64_t t = 0; t < kRows; ++t) {
          // Of many sizes, so that another order would be another sum.
          layer.SetKey(h, t, Normals(d, std::exp2(static_cast<double>(t % 12)), random));
        }
      }
      layer.Upload(d == 80 ? Place::kPinned : Place::kGpu);
      for (const int64_t count : {1024, 1100, 33, 1}) {
        Check(LaunchCentre(layer.Work(0, kRows), count, nullptr));
        const std::vector<float> centre = layer.FetchCentre();
        for (int h = 0; h < kHeads; ++h) {
          std::vector<double> sum(d, 0.0);
          for (int64_t t = 0; t < count; ++t) {
            const std::vector<float> key = layer.Key(h, t);
            for (int i = 0; i < d; ++i) sum[i] += key[i];
          }
          for (int i = 0; i < d; ++i) {
            const auto wanted = static_cast<float>(sum[i] / static_cast<double>(count));
            ASSERT_EQ(std::bit_cast<uint32_t>(centre[h * d + i]), std::bit_cast<uint32_t>(wanted))
                << "d " << d << " " << DTypeName(dtype) << ", " << count << " tokens, head " << h
                << " dimension " << i;
          }
        }
      }
    }
  }
}

}  // namespace
}  // namespace spillway::cuda
