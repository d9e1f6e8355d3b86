#include "host/cpu/page_encoder.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <random>
#include <string>
#include <tuple>
#include <vector>

#include "host/base/elements.h"
#include "tests/host/cpu/code_page.h"
#include "tests/reference/elements.h"
#include "tests/reference/page_index.h"

namespace spillway {
namespace {

using reference::KeyValues;
using reference::PageIndex;

// Rows of one KV head as bytes, and their index.
struct EncodedHead {
  ModelSpec spec;
  Encoder encoder;
  KeyValues kv;
  std::vector<std::byte> rows;
  std::vector<CodePage> pages;
  std::vector<float> radii;
  std::vector<PageValues> values;
  FirstRows first;

  // Rounds the elements of `head` to the dtype.
  EncodedHead(int d, int bits, DType dtype, bool raw_keys, KeyValues head)
      : encoder(d, bits, 42), kv(std::move(head)) {
    spec.head_dim = d;
    spec.dtype = dtype;
    spec.hash = {.kind = HashKind::kRotation, .raw_keys = raw_keys, .bits_per_dim = bits};
    for (double& x : kv.k) x = reference::Round(dtype, static_cast<float>(x));
    for (double& x : kv.v) x = reference::Round(dtype, static_cast<float>(x));
    std::vector<float> wide;
    for (int64_t t = 0; t < kv.n; ++t) {
      wide.insert(wide.end(), kv.k.begin() + t * d, kv.k.begin() + (t + 1) * d);
      wide.insert(wide.end(), kv.v.begin() + t * d, kv.v.begin() + (t + 1) * d);
    }
    rows = reference::Bytes(dtype, wide);
    radii.resize(kv.n);
    pages.assign(kv.n / kPageTokenCount, CodePage(encoder.params.layout));
    encoder.params.centre = nullptr;  // pages have their own
    for (size_t p = 0; p < pages.size(); ++p) {
      EncodePage(spec, encoder.params, Rows(p), pages[p].data(), Radii(p));
    }
    for (size_t p = 0; p < pages.size(); ++p) values.push_back(MeasureValues(spec, Rows(p)));
    first = MeasureFirstRows({values.data(), 8}, radii.data());
    for (size_t p = 0; p < pages.size(); ++p) {
      WriteNorms(encoder.params.layout, first, values[p], Radii(p), pages[p].data());
    }
  }

  const std::byte* Rows(size_t page) const {
    return rows.data() + page * kPageTokenCount * spec.row_bytes();
  }
  float* Radii(size_t page) { return radii.data() + page * kPageTokenCount; }
  std::vector<double> Centre(int64_t page) const {
    std::vector<float> centre(spec.head_dim);
    ToFloat(DType::kBF16, pages[page].bytes().data() + encoder.params.layout.centre_offset_bytes(),
            spec.head_dim, centre.data());
    return {centre.begin(), centre.end()};
  }
  uint8_t Norm(int64_t token) const {
    return static_cast<uint8_t>(
        pages[token / kPageTokenCount]
            .bytes()[encoder.params.layout.norm_offset_bytes() + token % kPageTokenCount]);
  }
  uint8_t SmallestNorm(int64_t page) const {
    uint8_t smallest = 255;
    for (int64_t t = page * 128; t < page * 128 + 128; ++t) smallest = std::min(smallest, Norm(t));
    return smallest;
  }
};

void Near(double got, double wanted, const std::string& what) {
  EXPECT_NEAR(got, wanted, 2e-6 * std::fabs(wanted)) << what;
}

// Compares the whole index with loops in fp64.
void ExpectIndex(EncodedHead& head) {
  const int d = head.spec.head_dim, bits = head.spec.hash.bits_per_dim;
  const PageIndex wanted = PageIndex::Of(head.kv, head.spec.hash.raw_keys);
  ASSERT_GT(wanted.margin, 1e-5) << "choose another seed";
  Near(head.first.statistics.median_radius, wanted.median_radius, "median radius");
  Near(head.first.statistics.value_reference, wanted.value_reference, "value reference");
  EXPECT_EQ(head.first.statistics.value_unit, wanted.value_unit);
  EXPECT_EQ(head.first.statistics.value_floor, wanted.value_floor);
  for (int i = 0; i < d; ++i) EXPECT_EQ(head.first.value_centre[i], wanted.value_centre[i]) << i;
  int64_t compared = 0;
  for (int64_t t = 0; t < head.kv.n; ++t) {
    const int64_t page = t / kPageTokenCount;
    const int slot = static_cast<int>(t % kPageTokenCount);
    const std::string token = "token " + std::to_string(t);
    if (slot == 0) {
      ASSERT_EQ(head.Centre(page), wanted.centres[page]) << token;
      const std::vector<float>& centre = head.values[page].centre;
      EXPECT_EQ(std::vector<double>(centre.begin(), centre.end()), wanted.value_centres[page]);
    }
    Near(head.radii[t], wanted.radii[t], token);
    const int norm = head.Norm(t);
    if (wanted.strays[t]) {
      EXPECT_EQ(norm, 255) << token;
    } else {
      EXPECT_GE(norm, wanted.Norm(t).low) << token;
      EXPECT_LE(norm, wanted.Norm(t).high) << token;
    }
    const reference::RotationCode code =
        reference::EncodeRotated(head.kv.Key(t), wanted.centres[page], head.encoder.rotation, bits);
    if (code.border_distance < 1e-4) continue;  // fp32 may fall on the other side
    ++compared;
    const CodePage& codes = head.pages[page];
    if (wanted.radii[t] == 0) {  // on its centre a key has no direction
      EXPECT_EQ(codes.Factor(slot), 0) << token;
      continue;
    }
    for (int j = 0; j < d; ++j) ASSERT_EQ(codes.Level(slot, j), code.levels[j]) << token;
    // If the exact factor is close to a tie, it may differ by one step of bfloat16.
    const double tolerance = code.factor_margin < 1e-5 ? code.factor / 128 : 0;
    ASSERT_NEAR(codes.Factor(slot), code.factor, tolerance) << token;
  }
  EXPECT_GT(compared, head.kv.n * 2 / 3);
}

// Twelve pages, some of them special. Page 2: one distant key; 3: twenty distant keys; 4: all keys
// equal; 5: all keys zero; 6: all values zero; 8: all keys further from their centre than is usual
// in the first pages, and a stray value; 9: all values far from those of the first pages; 10: the
// same, near each other but for three.
KeyValues Head(int d, DType dtype) {
  std::mt19937_64 random(d + 1000 * static_cast<int>(dtype));
  std::normal_distribution<double> normal;
  const double far = dtype == DType::kF16 ? 3e4 : 1e5;
  KeyValues kv{12 * 128, d, {}, {}};
  for (int64_t t = 0; t < kv.n; ++t) {
    const int64_t page = t / 128;
    const double size = std::exp(normal(random));
    for (int i = 0; i < d; ++i) {
      double k = 2 * std::sin(static_cast<double>(i) + static_cast<double>(page)) + normal(random);
      double v = 1 + size * normal(random);
      if (page == 2 && t % 128 == 77) k = i == 3 ? far : 0;
      if (page == 3 && t % 128 < 20) k = i == 5 ? 300 + normal(random) : 0;
      if (page == 4) k = 0.3 * i;
      if (page == 5) k = 0;
      if (page == 6) v = 0;
      if (page == 8) k = 9 * normal(random);
      if (page == 8 && t % 128 == 9) v *= dtype == DType::kF16 ? 3e3 : 2e6;
      if (page == 9 || page == 10) v += 40;
      if (page == 10) v = 40 + normal(random) / 8 + (t % 128 < 3 ? 20 : 0);
      kv.k.push_back(k);
      kv.v.push_back(v);
    }
  }
  return kv;
}

// Parameters: head_dim, bits per dimension, dtype, raw keys.
class PageEncoder : public ::testing::TestWithParam<std::tuple<int, int, DType, bool>> {};

TEST_P(PageEncoder, KeepsWhatTheRulesSay) {
  const auto [d, bits, dtype, raw_keys] = GetParam();
  EncodedHead head(d, bits, dtype, raw_keys, Head(d, dtype));
  ExpectIndex(head);
  if (raw_keys) return;
  // The distant keys do not move the centres of their pages, and are strays.
  for (const int page : {2, 3}) {
    EXPECT_LT(reference::Norm(head.Centre(page)), 4 * std::sqrt(d)) << page;
  }
  EXPECT_EQ(head.Norm(2 * 128 + 77), 255);
  for (int t = 3 * 128; t < 3 * 128 + 20; ++t) EXPECT_EQ(head.Norm(t), 255);
  EXPECT_NE(head.Norm(8 * 128 + 10), 255);
  // The far pages are lifted, and the three values of page 10 stand out there.
  EXPECT_LT(head.SmallestNorm(11), 127);
  EXPECT_GT(head.SmallestNorm(9), 127);
  EXPECT_GT(head.SmallestNorm(10), 127);
  for (int t = 10 * 128; t < 10 * 128 + 3; ++t) {
    EXPECT_GT(head.Norm(t), head.Norm(10 * 128 + 64) + 8 * 4) << t;
  }
  if (dtype != DType::kF16) {
    EXPECT_EQ(head.Norm(8 * 128 + 9), 255);
  }
}

INSTANTIATE_TEST_SUITE_P(
    Shapes, PageEncoder,
    ::testing::Values(std::tuple(16, 1, DType::kF32, false), std::tuple(16, 3, DType::kBF16, false),
                      std::tuple(64, 2, DType::kF16, false), std::tuple(64, 3, DType::kF32, false),
                      std::tuple(64, 4, DType::kBF16, true), std::tuple(80, 4, DType::kF16, false),
                      std::tuple(96, 1, DType::kBF16, false),
                      std::tuple(128, 3, DType::kBF16, false),
                      std::tuple(128, 2, DType::kF32, true), std::tuple(256, 3, DType::kF16, false),
                      std::tuple(256, 1, DType::kF32, false)),
    [](const auto& info) {
      return "d" + std::to_string(std::get<0>(info.param)) + "b" +
             std::to_string(std::get<1>(info.param)) +
             std::string(DTypeName(std::get<2>(info.param))) +
             (std::get<3>(info.param) ? "raw" : "");
    });

KeyValues NormalHead(int64_t n, int d, uint64_t seed) {
  std::mt19937_64 random(seed);
  std::normal_distribution<double> normal;
  KeyValues kv{n, d, std::vector<double>(n * d), std::vector<double>(n * d)};
  for (double& x : kv.k) x = normal(random);
  for (double& x : kv.v) x = normal(random);
  return kv;
}

// Norms come from ratios, so values of any size have the same norms.
TEST(PageEncoderValues, OfAnySizeHaveTheSameNorms) {
  const KeyValues plain = NormalHead(1024, 32, 5);
  EncodedHead expected(32, 2, DType::kF32, false, plain);
  for (const double factor : {std::ldexp(1, -100), std::ldexp(1, 100)}) {
    KeyValues kv = plain;
    for (double& v : kv.v) v = static_cast<float>(v) * factor;
    EncodedHead head(32, 2, DType::kF32, false, kv);
    ExpectIndex(head);
    EXPECT_EQ(head.first.statistics.value_unit, expected.first.statistics.value_unit * factor);
    EXPECT_EQ(head.first.statistics.value_floor, expected.first.statistics.value_floor);
    for (int64_t t = 0; t < kv.n; ++t) ASSERT_EQ(head.Norm(t), expected.Norm(t)) << t;
  }
}

TEST(PageEncoderValues, ThatAreAllEqualAreNoneFromTheirCentre) {
  for (const double value : {0.0, 3.5}) {
    KeyValues kv = NormalHead(1024 + 128, 16, 6);
    std::fill(kv.v.begin(), kv.v.end(), value);
    kv.v[1100 * 16] += 64;
    EncodedHead head(16, 2, DType::kF32, false, kv);
    EXPECT_EQ(head.first.statistics.value_reference, 1);
    EXPECT_EQ(head.first.statistics.value_unit, 1);
    EXPECT_EQ(head.first.statistics.value_floor, -127);
    EXPECT_FALSE(ValuesCanBeSampled(head.first.statistics.value_floor));
    for (const int t : {0, 500, 1023, 1101}) EXPECT_EQ(head.Norm(t), 0);
    EXPECT_EQ(head.Norm(1100), 127 + 8 * 6);
  }
}

// The reference is that of the values that differ; the floor shows how few they are.
TEST(PageEncoderValues, OfWhichFewDifferHaveALowFloor) {
  for (const auto& [every, floor] :
       {std::pair(256, -32), std::pair(16, -16), std::pair(4, -8), std::pair(1, -8)}) {
    KeyValues kv = NormalHead(1024, 16, 7);
    std::fill(kv.v.begin(), kv.v.end(), 0.0);
    // In alternating directions, so that their mean is 0.
    for (int64_t t = 0, sign = 1; t < 1024; t += every, sign = -sign) {
      kv.v[t * 16 + 3] = 5.0 * static_cast<double>(sign);
    }
    EncodedHead head(16, 2, DType::kBF16, false, kv);
    EXPECT_EQ(head.first.statistics.value_floor, floor) << every;
    EXPECT_EQ(ValuesCanBeSampled(floor), every <= 16);
    EXPECT_NEAR(head.first.statistics.value_reference, 5, 0.5) << every;
    EXPECT_EQ(head.first.statistics.value_unit, 4) << every;
  }
}

}  // namespace
}  // namespace spillway
