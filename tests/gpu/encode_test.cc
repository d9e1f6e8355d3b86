#include "gpu/kernels/encode.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <memory>
#include <random>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "gpu/kernels/append.h"
#include "host/codes/rotation.h"
#include "tests/gpu/expect_page.h"

namespace spillway::cuda {
namespace {

constexpr int kHeads = 2;
constexpr int64_t kFirstPages = kCentreTokenCount / kPageTokenCount;
constexpr int64_t kPages = kFirstPages + 4;
// The last page is open.
constexpr int64_t kTokens = kPages * kPageTokenCount - 1;

// The page index of a layer on the GPU, compared with the reference.
class PageIndex {
 public:
  PageIndex(int d, int bits, DType dtype, bool raw_keys = false)
      : d_(d),
        bits_(bits),
        dtype_(dtype),
        raw_keys_(raw_keys),
        rotation_(MakeRotation(d, 42, 0)),
        layer_(kHeads, d, dtype, kTokens, CodeTiling{bits, (d + 31) / 32, d}) {
    std::mt19937 random(d * 8 + bits);
    for (int h = 0; h < kHeads; ++h) {
      const std::vector<float> bias = Normals(d, 2, random);
      for (int64_t t = 0; t < kTokens; ++t) {
        std::vector<float> key = Normals(d, 1, random);
        for (int i = 0; i < d; ++i) key[i] += bias[i];
        layer_.SetKey(h, t, key);
        layer_.SetValue(h, t, Normals(d, 1, random));
      }
    }
  }
  Layer& layer() { return layer_; }
  DType dtype() const { return dtype_; }
  int d() const { return d_; }

  // Indexes the layer as long appends do: the first pages of scratch_heads heads at a time, then
  // the pages up to page `split`, then the rest. Compares the index with the reference.
  void ExpectReference(Place rows, int scratch_heads, int64_t split) {
    layer_.Upload(rows);
    std::vector<float> transposed(rotation_.size());
    for (int i = 0; i < d_; ++i) {
      for (int j = 0; j < d_; ++j) transposed[i * d_ + j] = rotation_[j * d_ + i];
    }
    const DeviceArray<float> device_transposed(transposed);
    const RotationWeights weights{bits_, raw_keys_, device_transposed.data()};
    const DeviceArray<HeadStatistics> statistics(
        std::vector<HeadStatistics>(kHeads, HeadStatistics{}));
    const DeviceArray<float> value_centres(std::vector<float>(kHeads * d_, NAN));
    const HeadIndex heads{statistics.data(), value_centres.data()};
    const int64_t scratch_bytes = scratch_heads * FirstPagesScratchBytes(d_);
    const DeviceArray<std::byte> scratch(
        std::vector<std::byte>(static_cast<size_t>(scratch_bytes), kPoison));
    Check(LaunchEncodeFirstPages(layer_.Work(0, 0), weights, heads, scratch.data(), scratch_bytes,
                                 nullptr));
    const int64_t end = ClosedPages(kTokens) * kPageTokenCount;
    split *= kPageTokenCount;
    Check(LaunchEncodePages(layer_.Work(kCentreTokenCount, split), weights, heads, nullptr));
    Check(LaunchEncodePages(layer_.Work(split, end), weights, heads, nullptr));

    std::vector<std::vector<std::byte>> pages = layer_.FetchCodes();
    const std::vector<HeadStatistics> found = statistics.Fetch();
    const std::vector<float> centres = value_centres.Fetch();
    for (int h = 0; h < kHeads; ++h) {
      SCOPED_TRACE("head " + std::to_string(h));
      reference::Vectors keys, values;
      for (int64_t t = 0; t < kTokens; ++t) {
        keys.push_back(layer_.Key(h, t));
        values.push_back(layer_.Value(h, t));
      }
      const reference::Head wanted = reference::IndexOf(keys, values, raw_keys_);
      ExpectStatistics(found[h], wanted.first.statistics);
      for (int i = 0; i < d_; ++i) {
        ASSERT_EQ(centres[h * d_ + i], wanted.first.value_centre[i]) << "dimension " << i;
      }
      for (size_t p = 0; p < wanted.pages.size(); ++p) {
        SCOPED_TRACE("page " + std::to_string(p));
        ExpectPage(layer_.tiling(), pages[h * layer_.pages() + static_cast<int64_t>(p)],
                   wanted.pages[p],
                   {keys.begin() + static_cast<int64_t>(p) * kPageTokenCount,
                    keys.begin() + static_cast<int64_t>(p + 1) * kPageTokenCount},
                   rotation_);
        if (::testing::Test::HasFatalFailure()) return;
      }
    }
    ExpectPoisonOutside(std::move(pages), layer_, 0, end);
  }

 private:
  const int d_;
  const int bits_;
  const DType dtype_;
  const bool raw_keys_;
  const std::vector<float> rotation_;
  Layer layer_;
};

// Parameters: head_dim, bits per dimension, dtype.
class GpuEncode : public ::testing::TestWithParam<std::tuple<int, int, DType>> {
 protected:
  void SetUp() override { SKIP_WITHOUT_GPU(); }

  // A large and a small number that the dtype can hold.
  static float Large(DType dtype) { return dtype == DType::kF16 ? 6.0e4f : 1.0e30f; }
  static float Small(DType dtype) { return dtype == DType::kF16 ? 6.0e-8f : 1.0e-30f; }

  // Gives head 0 keys that are distributed in unusual ways.
  static void SetStrangeKeys(PageIndex& index, std::mt19937& random) {
    Layer& layer = index.layer();
    const int d = index.d();
    const auto key = [&](int64_t page, int64_t slot, const std::vector<float>& to) {
      layer.SetKey(0, page * kPageTokenCount + slot, to);
    };
    const std::vector<float> same = Normals(d, 1, random);
    // One outlier in a page, among the first pages and later.
    std::vector<float> outlier(d, 0.0f);
    outlier[d - 1] = -std::min(1.0e5f, Large(index.dtype()));
    key(1, 77, outlier);
    key(9, 0, outlier);
    for (int64_t slot = 0; slot < kPageTokenCount; ++slot) {
      // Page 2: all keys equal; 3: all zero; 4: all equal except one; 5: two distant clusters; 6
      // and 10: so small or so large that quotients could be lost.
      key(2, slot, same);
      key(3, slot, std::vector<float>(d, 0.0f));
      key(4, slot, slot == 127 ? outlier : same);
      std::vector<float> far = Normals(d, 1, random);
      for (float& x : far) x += slot % 2 == 0 ? 300.0f : -300.0f;
      key(5, slot, far);
      key(6, slot, Normals(d, Small(index.dtype()), random));
      // Page 7: positive elements of all sizes. Many keys are close to the limit for distant keys.
      std::vector<float> skew = Normals(d, std::exp2(static_cast<double>(slot % 64) / 8), random);
      for (float& x : skew) x = std::abs(x);
      key(7, slot, skew);
      key(10, slot, Normals(d, Large(index.dtype()) / 8, random));
    }
    // Strays, and a key with elements of very different sizes.
    for (int64_t slot = 0; slot < 20; ++slot) key(8, 6 * slot, Normals(d, 50, random));
    std::vector<float> mixed = Normals(d, 1, random);
    for (int i = 0; i < d; i += 2) mixed[i] *= Small(index.dtype());
    mixed[3] = Large(index.dtype());
    key(0, 5, mixed);
    key(0, 6, outlier);
  }

  // Gives head 1 values of many sizes, some of them 0.
  static void SetStrangeValues(PageIndex& index, std::mt19937& random) {
    Layer& layer = index.layer();
    for (int64_t t = 0; t < kTokens; t += 7) {
      const double octave = std::min(20.0f, std::log2(Large(index.dtype())) - 4);
      std::uniform_real_distribution<double> octaves(-octave, octave);
      layer.SetValue(1, t, Normals(index.d(), std::exp2(octaves(random)), random));
    }
    for (int64_t t = 3; t < kTokens; t += 40) {
      layer.SetValue(1, t, std::vector<float>(index.d(), 0.0f));
    }
    // Head 0: the values of three pages, one of them among the first, are far from the others; in
    // the last one they are near each other but for two.
    for (const int64_t page : {int64_t{6}, kFirstPages + 1, kFirstPages + 2}) {
      for (int64_t slot = 0; slot < kPageTokenCount; ++slot) {
        const double size = page < kFirstPages + 2 ? 1 : slot % 70 == 5 ? 30 : 0.1;
        std::vector<float> value = Normals(index.d(), size, random);
        for (float& x : value) x += 50;
        layer.SetValue(0, page * kPageTokenCount + slot, value);
      }
    }
  }
};

TEST_P(GpuEncode, PagesHaveTheReferencesIndex) {
  const auto [d, bits, dtype] = GetParam();
  PageIndex index(d, bits, dtype);
  std::mt19937 random(17);
  SetStrangeKeys(index, random);
  SetStrangeValues(index, random);
  index.ExpectReference(bits % 2 == 0 ? Place::kPinned : Place::kGpu, /*scratch_heads=*/1 + d / 100,
                        kFirstPages + bits % 3);
}

// For tests that do not depend on the number of bits.
class GpuEncodeOnce : public GpuEncode {};

TEST_P(GpuEncodeOnce, RawKeysHaveNoCentre) {
  const auto [d, bits, dtype] = GetParam();
  PageIndex index(d, bits, dtype, /*raw_keys=*/true);
  std::mt19937 random(19);
  SetStrangeKeys(index, random);
  index.ExpectReference(Place::kGpu, kHeads, kFirstPages + 1);
}

TEST_P(GpuEncodeOnce, ValuesOfAnySize) {
  const auto [d, bits, dtype] = GetParam();
  const float large = Large(dtype) / 8, small = Small(dtype);
  const auto expect = [&](const std::string& what, auto value) {
    SCOPED_TRACE(what);
    PageIndex index(d, bits, dtype);
    std::mt19937 random(23);
    for (int h = 0; h < kHeads; ++h) {
      for (int64_t t = 0; t < kTokens; ++t) index.layer().SetValue(h, t, value(t, random));
    }
    index.ExpectReference(Place::kGpu, kHeads, kFirstPages + 1);
  };
  const auto normals = [&](float scale) {
    return [&, scale](int64_t, std::mt19937& random) { return Normals(d, scale, random); };
  };
  const auto zeros_but = [&](int64_t every, float scale) {
    return [&, every, scale](int64_t t, std::mt19937& random) {
      return t % every == 0 ? Normals(d, scale, random) : std::vector<float>(d, 0.0f);
    };
  };
  expect("all zero", zeros_but(kTokens, 0));
  expect("one is not zero", zeros_but(kTokens, 1));
  expect("few are not zero", zeros_but(250, large));
  expect("large", normals(large));
  expect("small", normals(small));
  expect("small, some large", [&](int64_t t, std::mt19937& random) {
    return Normals(d, t % 100 == 0 ? large : small, random);
  });
  expect("large, some small", [&](int64_t t, std::mt19937& random) {
    return Normals(d, t % 100 == 0 ? small : large, random);
  });
  // The first values decide which size is usual.
  expect("growing", [&](int64_t t, std::mt19937& random) {
    return Normals(d, t < kCentreTokenCount ? small : large, random);
  });
  expect("all equal", [&](int64_t, std::mt19937&) { return std::vector<float>(d, large); });
}

std::string ShapeName(const ::testing::TestParamInfo<GpuEncode::ParamType>& info) {
  const auto [d, bits, dtype] = info.param;
  return "d" + std::to_string(d) + "b" + std::to_string(bits) + std::string(DTypeName(dtype));
}
const auto kDTypes = ::testing::Values(DType::kF32, DType::kF16, DType::kBF16);

INSTANTIATE_TEST_SUITE_P(Shapes, GpuEncode,
                         ::testing::Combine(::testing::Values(16, 64, 80, 128, 144, 256),
                                            ::testing::Values(1, 2, 3, 4), kDTypes),
                         ShapeName);
INSTANTIATE_TEST_SUITE_P(Shapes, GpuEncodeOnce,
                         ::testing::Combine(::testing::Values(16, 80, 128, 256),
                                            ::testing::Values(1), kDTypes),
                         ShapeName);

// The rows that a decode step appends, and the addresses of their pages.
TEST(GpuStepAppend, CopiesRowsAndUpdatesTables) {
  SKIP_WITHOUT_GPU();
  for (const int64_t row_bytes : {64, 512, 2048}) {
    constexpr int kRows = 5;
    std::vector<std::byte> rows(static_cast<size_t>(kRows * row_bytes));
    for (size_t i = 0; i < rows.size(); ++i) rows[i] = static_cast<std::byte>(i * 7 + i / 256);
    const DeviceArray<std::byte> from(rows, Place::kPinned);
    const DeviceArray<std::byte> to(std::vector<std::byte>(rows.size(), kPoison));
    const DeviceArray<uint64_t> slots(std::vector<uint64_t>(300, 7));
    // The counts below leave out the last copy and the last update.
    std::vector<RowCopy> copies;
    for (int i = 0; i < kRows; ++i) {
      copies.push_back({from.data() + i * row_bytes, to.data() + i * row_bytes});
    }
    std::vector<TableUpdate> updates;
    for (uint64_t i = 0; i < 300; ++i) updates.push_back({slots.data() + i, i});
    const DeviceArray<RowCopy> copy_list(copies, Place::kPinned);
    const DeviceArray<TableUpdate> update_list(updates, Place::kPinned);
    const DeviceArray<AppendCounts> counts(std::vector<AppendCounts>{{299, kRows - 1}},
                                           Place::kPinned);
    StepAppend step{row_bytes, 0, update_list.data(), copy_list.data(), counts.data()};
    Check(LaunchStepAppend(step, nullptr));
    EXPECT_EQ(slots.Fetch(), std::vector<uint64_t>(300, 7)) << "nothing is appended";
    step.row_count = kRows;
    Check(LaunchStepAppend(step, nullptr));
    std::fill(rows.end() - row_bytes, rows.end(), kPoison);
    EXPECT_EQ(to.Fetch(), rows) << row_bytes << " bytes a row";
    std::vector<uint64_t> wanted(300);
    for (uint64_t i = 0; i < 299; ++i) wanted[i] = i;
    wanted[299] = 7;
    EXPECT_EQ(slots.Fetch(), wanted);
  }
}

TEST(GpuCentre, IsTheDoubleSumInTokenOrder) {
  SKIP_WITHOUT_GPU();
  constexpr int64_t kRows = 1100;
  for (const int d : {16, 80, 128, 256}) {
    for (const DType dtype : {DType::kF32, DType::kF16, DType::kBF16}) {
      Layer layer(kHeads, d, dtype, kRows, CodeTiling{1, (d + 31) / 32, d});
      std::mt19937 random(d);
      for (int h = 0; h < kHeads; ++h) {
        for (int64_t t = 0; t < kRows; ++t) {
          // Keys of many sizes, so that another order of summation would give another sum.
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
