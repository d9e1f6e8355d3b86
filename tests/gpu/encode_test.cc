#include "gpu/kernels/encode.h"

#include <gmock/gmock.h>
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

#include "gpu/kernels/append.h"
#include "host/base/elements.h"
#include "host/cpu/kernels.h"
#include "host/methods/weights/mlp.h"
#include "tests/gpu/device_array.h"
#include "tests/host/cpu/code_page.h"

namespace spillway::cuda {
namespace {

constexpr std::byte kPoison{0xCD};

bool HasGpu() {
  int count = 0;
  const bool found = cudaGetDeviceCount(&count) == cudaSuccess && count > 0;
  if (!found) cudaGetLastError();
  return found;
}

#define SKIP_WITHOUT_GPU() \
  if (!HasGpu()) GTEST_SKIP() << "this machine has no CUDA GPU"

std::vector<float> Normals(size_t count, double scale, std::mt19937& random) {
  std::normal_distribution<float> normal(0, static_cast<float>(scale));
  std::vector<float> values(count);
  for (float& x : values) x = normal(random);
  return values;
}

// Rows of a layer and where its codes go, pages in no order.
class Layer {
 public:
  Layer(int heads, int d, DType dtype, int64_t token_count, const CodeTiling& tiling)
      : heads_(heads),
        d_(d),
        dtype_(dtype),
        pages_((token_count + kPageTokenCount - 1) / kPageTokenCount),
        tiling_(tiling),
        place_of_(heads * pages_),
        rows_(heads * pages_ * page_bytes(), std::byte{0x7F}),
        centre_(heads * d) {
    std::iota(place_of_.begin(), place_of_.end(), int64_t{0});
    std::shuffle(place_of_.begin(), place_of_.end(), std::mt19937(d));
  }

  int64_t row_bytes() const { return int64_t{2} * d_ * DTypeBytes(dtype_); }
  int64_t page_bytes() const { return row_bytes() * kPageTokenCount; }
  const std::byte* Row(int head, int64_t token) const {
    return rows_.data() + place_of_[head * pages_ + token / kPageTokenCount] * page_bytes() +
           token % kPageTokenCount * row_bytes();
  }
  void SetKey(int head, int64_t token, const std::vector<float>& key) {
    FromFloat(dtype_, key.data(), d_, const_cast<std::byte*>(Row(head, token)));
  }
  std::vector<float> Key(int head, int64_t token) const {
    std::vector<float> key(d_);
    ToFloat(dtype_, Row(head, token), d_, key.data());
    return key;
  }
  float* Centre(int head) { return centre_.data() + head * d_; }

  // Puts everything where kernels see it; codes are poison.
  void Upload(Place rows = Place::kGpu) {
    device_rows_ = std::make_unique<DeviceArray<std::byte>>(rows_, rows);
    device_centre_ = std::make_unique<DeviceArray<float>>(centre_);
    device_codes_ = std::make_unique<DeviceArray<std::byte>>(
        std::vector<std::byte>(place_of_.size() * tiling_.page_bytes(), kPoison));
    std::vector<const std::byte*> row_pages;
    std::vector<std::byte*> code_pages;
    for (const int64_t place : place_of_) {
      row_pages.push_back(device_rows_->data() + place * page_bytes());
      code_pages.push_back(device_codes_->data() + place * tiling_.page_bytes());
    }
    row_pages_ = std::make_unique<DeviceArray<const std::byte*>>(row_pages);
    code_pages_ = std::make_unique<DeviceArray<std::byte*>>(code_pages);
  }
  EncodeWork Work(int64_t begin, int64_t end) const {
    EncodeWork work;
    work.dtype = dtype_;
    work.head_dim = d_;
    work.kv_head_count = heads_;
    work.row_bytes = row_bytes();
    work.begin = begin;
    work.end = end;
    work.row_pages = row_pages_->data();
    work.row_page_capacity = pages_;
    work.code_pages = code_pages_->data();
    work.code_page_capacity = pages_;
    work.tiling = tiling_;
    work.centre = device_centre_->data();
    return work;
  }
  // The same tokens, each by itself.
  std::vector<AppendedKey> Keys(int64_t begin, int64_t end, const float* transposed) const {
    std::vector<AppendedKey> keys;
    for (int64_t t = begin; t < end; ++t) {
      for (int h = 0; h < heads_; ++h) {
        const int64_t place = place_of_[h * pages_ + t / kPageTokenCount];
        keys.push_back(
            {device_rows_->data() + place * page_bytes() + t % kPageTokenCount * row_bytes(),
             device_codes_->data() + place * tiling_.page_bytes(), device_centre_->data() + h * d_,
             transposed, t % kPageTokenCount});
      }
    }
    return keys;
  }
  std::vector<float> FetchCentre() const { return device_centre_->Fetch(); }

  // Code pages as the kernels left them, [head][page].
  std::vector<std::vector<std::byte>> FetchCodes() const {
    const std::vector<std::byte> all = device_codes_->Fetch();
    std::vector<std::vector<std::byte>> pages;
    for (const int64_t place : place_of_) {
      const auto first = all.begin() + place * tiling_.page_bytes();
      pages.emplace_back(first, first + tiling_.page_bytes());
    }
    return pages;
  }

  int64_t pages() const { return pages_; }
  const CodeTiling& tiling() const { return tiling_; }

 private:
  const int heads_;
  const int d_;
  const DType dtype_;
  const int64_t pages_;  // of a head
  const CodeTiling tiling_;
  std::vector<int64_t> place_of_;  // of page p of head h, in pages
  std::vector<std::byte> rows_;
  std::vector<float> centre_;
  std::unique_ptr<DeviceArray<std::byte>> device_rows_, device_codes_;
  std::unique_ptr<DeviceArray<float>> device_centre_;
  std::unique_ptr<DeviceArray<const std::byte*>> row_pages_;
  std::unique_ptr<DeviceArray<std::byte*>> code_pages_;
};

// One token's code, by the description of CodeTiling alone: planes uint32
// [plane][group][chunk][row][word][tile], factors behind.
class TokenCode {
 public:
  TokenCode(const CodeTiling& tiling, std::vector<std::byte>& page, int slot)
      : tiling_(tiling), page_(page), slot_(slot) {}

  bool Bit(int plane, int j) const { return Word(plane, j / 32) >> (j % 32) & 1; }
  int Level(int j) const {
    int level = 0;
    for (int plane = 0; plane < tiling_.planes; ++plane) level |= Bit(plane, j) << plane;
    return level;
  }
  uint16_t Factor() const {
    uint16_t f;
    std::memcpy(&f, FactorAddress(), 2);
    return f;
  }
  // Poisons the token's words and factor.
  void Poison() {
    for (int plane = 0; plane < tiling_.planes; ++plane) {
      for (int word = 0; word < tiling_.words; ++word) {
        std::fill_n(WordAddress(plane, word), 4, kPoison);
      }
    }
    if (tiling_.factors) std::fill_n(FactorAddress(), 2, kPoison);
  }

 private:
  std::byte* WordAddress(int plane, int word) const {
    const int chunk = word / 4;
    const int chunk_words = std::min(4, tiling_.words - chunk * 4);
    const int group = slot_ / 32, tile = slot_ % 32 / 8, row = slot_ % 8;
    const int before = (plane * 4 + group) * tiling_.words * 32 + chunk * 4 * 32;
    return page_.data() + 4 * (before + (row * chunk_words + word % 4) * 4 + tile);
  }
  std::byte* FactorAddress() const {
    return page_.data() + tiling_.planes * tiling_.words * 128 * 4 +
           (slot_ / 32 * 32 + slot_ % 8 * 4 + slot_ % 32 / 8) * 2;
  }
  uint32_t Word(int plane, int word) const {
    uint32_t w;
    std::memcpy(&w, WordAddress(plane, word), 4);
    return w;
  }

  const CodeTiling& tiling_;
  std::vector<std::byte>& page_;
  const int slot_;
};

// Whether no byte but those of tokens [begin, end) was written.
void ExpectPoisonOutside(std::vector<std::vector<std::byte>> pages, const Layer& layer,
                         int64_t begin, int64_t end) {
  for (size_t i = 0; i < pages.size(); ++i) {
    const int64_t first = static_cast<int64_t>(i) % layer.pages() * kPageTokenCount;
    for (int slot = 0; slot < kPageTokenCount; ++slot) {
      if (first + slot < begin || first + slot >= end) continue;
      TokenCode(layer.tiling(), pages[i], slot).Poison();
    }
    const auto written =
        std::find_if(pages[i].begin(), pages[i].end(), [](std::byte b) { return b != kPoison; });
    ASSERT_EQ(written - pages[i].begin(), static_cast<int64_t>(pages[i].size()))
        << "a byte of no token in [" << begin << ", " << end << ") was written, head "
        << i / layer.pages() << " page " << i % layer.pages();
  }
}

// ---- rotation ----------------------------------------------------------

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

// ---- MLP ---------------------------------------------------------------

struct MlpShape {
  int d, hidden, bits;
  bool residual, b2;
};

class GpuMlp : public ::testing::TestWithParam<MlpShape> {
 protected:
  // exp() has other last bits on a GPU, so signs may differ next to zero.
  static constexpr float kNearZero = 1e-3f;

  void SetUp() override { SKIP_WITHOUT_GPU(); }

  // Makes `heads` heads' weights, here and on the GPU.
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

  // bit(j) is the code of x on the GPU.
  template <typename Bit>
  void ExpectCode(int head, const std::vector<float>& x, const Bit& bit) {
    std::vector<float> y(mlp_.hash_bits);
    MlpOutput(mlp_, head, x.data(), y.data());
    for (int j = 0; j < mlp_.hash_bits; ++j) {
      if (std::abs(y[j]) < kNearZero) continue;
      ASSERT_EQ(bit(j), y[j] > 0) << "bit " << j << ", y " << y[j];
    }
  }

  // Keys [begin, end) of `heads` KV heads, `codes` codes each.
  void ExpectKeys(int heads, int codes, DType dtype, int64_t begin, int64_t end, Place rows) {
    SCOPED_TRACE("tokens [" + std::to_string(begin) + ", " + std::to_string(end) + ") of " +
                 std::to_string(heads) + " heads, " + std::to_string(codes) + " codes a key");
    const MlpShape s = GetParam();
    std::mt19937 random(s.d + s.hidden + s.bits);
    const MlpWeightsView weights = MakeWeights(heads * codes, random);
    Layer layer(heads, s.d, dtype, end, CodeTiling{1, codes * s.bits / 32, false});
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
    // One more than there are, which stays as it is.
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
  // Few blocks and many; the limit is 128 of four tokens.
  ExpectKeys(2, 1, DType::kBF16, 126, 131, Place::kGpu);
  ExpectKeys(2, 1, DType::kF32, 130, 131, Place::kPinned);
  ExpectKeys(9, 1, DType::kF16, 100, 161, Place::kGpu);
}

TEST_P(GpuMlp, KeysHaveACodeOfEveryMlpOfTheirHead) {
  // As many as a plane of 1,024 bits has room for, up to a group of 16.
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
