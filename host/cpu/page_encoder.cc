#include "host/cpu/page_encoder.h"

#include <algorithm>
#include <cmath>
#include <cstring>

#include "host/base/elements.h"

namespace spillway {
namespace {

// The element at position n / 2 in ascending order.
float Median(std::span<const float> values) {
  std::vector<float> sorted(values.begin(), values.end());
  const auto middle = sorted.begin() + static_cast<std::ptrdiff_t>(sorted.size() / 2);
  std::nth_element(sorted.begin(), middle, sorted.end());
  return *middle;
}

// `count` keys, or values, in fp32: [count][d].
std::vector<float> Widen(const ModelSpec& spec, const std::byte* vectors, int count) {
  std::vector<float> wide(static_cast<size_t>(count) * spec.head_dim);
  for (int t = 0; t < count; ++t) {
    ToFloat(spec.dtype, vectors + t * spec.element_row_bytes(), spec.head_dim,
            wide.data() + static_cast<size_t>(t) * spec.head_dim);
  }
  return wide;
}

// The mean of the vectors t for which takes(t), rounded to bf16.
template <typename Takes>
void MeanToBf16(std::span<const float> vectors, int d, Takes takes, std::byte* centre) {
  std::vector<double> sum(d, 0.0);
  int count = 0;
  for (size_t t = 0; t < vectors.size() / d; ++t) {
    if (!takes(t)) continue;
    ++count;
    for (int i = 0; i < d; ++i) sum[i] += vectors[t * d + i];
  }
  std::vector<float> mean(d);
  for (int i = 0; i < d; ++i) mean[i] = static_cast<float>(sum[i] / count);
  FromFloat(DType::kBF16, mean.data(), d, centre);
}

// The distance of two vectors, as in RadiusOf().
float Distance(std::span<const float> x, std::span<const float> centre) {
  float largest = 0;
  for (size_t i = 0; i < x.size(); ++i) largest = std::max(largest, std::fabs(x[i] - centre[i]));
  if (largest == 0) return 0;
  float squares = 0;
  for (size_t i = 0; i < x.size(); ++i) {
    const float ratio = (x[i] - centre[i]) / largest;
    squares = std::fma(ratio, ratio, squares);
  }
  return RadiusOf(largest, squares);
}

// Computes the radii of a page's keys about its bf16 centre, which is widened into `wide`. Returns
// their median.
float PageRadii(const ModelSpec& spec, const std::byte* rows, const std::byte* centre,
                std::vector<float>& wide, float* radii) {
  ToFloat(DType::kBF16, centre, spec.head_dim, wide.data());
  Distances(spec.dtype, rows, spec.element_row_bytes(), kPageTokenCount, spec.head_dim, wide.data(),
            radii);
  return Median({radii, kPageTokenCount});
}

// Computes the centre of a page again, from the keys that lie near the median per coordinate.
void CentreAgain(const ModelSpec& spec, const std::byte* rows, std::span<const float> keys,
                 std::byte* centre) {
  const int d = spec.head_dim;
  std::vector<float> medians(d);
  float coordinate[kPageTokenCount];
  for (int i = 0; i < d; ++i) {
    for (int t = 0; t < kPageTokenCount; ++t) coordinate[t] = keys[t * d + i];
    medians[i] = Median(coordinate);
  }
  float radii[kPageTokenCount];
  Distances(spec.dtype, rows, spec.element_row_bytes(), kPageTokenCount, d, medians.data(), radii);
  const float most = kStrayFactor * Median(radii);
  MeanToBf16(
      keys, d, [&](size_t t) { return radii[t] <= most; }, centre);
}

}  // namespace

void EncodePage(const ModelSpec& spec, EncodeParams params, const std::byte* rows, std::byte* page,
                float* radii) {
  const int d = spec.head_dim;
  std::byte* const centre = page + params.layout.centre_offset_bytes();
  std::vector<float> wide(d);
  if (spec.hash.raw_keys) {
    std::memset(centre, 0, 2 * static_cast<size_t>(d));
    PageRadii(spec, rows, centre, wide, radii);
  } else {
    const std::vector<float> keys = Widen(spec, rows, kPageTokenCount);
    MeanToBf16(
        keys, d, [](size_t) { return true; }, centre);
    const float median = PageRadii(spec, rows, centre, wide, radii);
    if (*std::max_element(radii, radii + kPageTokenCount) > kStrayFactor * median) {
      CentreAgain(spec, rows, keys, centre);
      PageRadii(spec, rows, centre, wide, radii);
    }
  }
  params.centre = wide.data();
  for (int tile = 0; tile < kTilesPerPage; ++tile) {
    EncodeTile(params, spec.dtype, rows + tile * kTileTokenCount * spec.element_row_bytes(),
               spec.element_row_bytes(), page, tile);
  }
}

PageValues MeasureValues(const ModelSpec& spec, const std::byte* rows) {
  const int d = spec.head_dim;
  const std::byte* values = rows + spec.element_row_bytes() / 2;
  const std::vector<float> wide = Widen(spec, values, kPageTokenCount);
  PageValues page;
  page.centre.resize(d);
  for (int i = 0; i < d; ++i) {
    float means[kValueRunCount];
    for (int run = 0; run < kValueRunCount; ++run) {
      double sum = 0;
      for (int t = 0; t < kValueRunTokens; ++t) sum += wide[(run * kValueRunTokens + t) * d + i];
      means[run] = static_cast<float>(sum / kValueRunTokens);
    }
    page.centre[i] = Median(means);
  }
  Distances(spec.dtype, values, spec.element_row_bytes(), kPageTokenCount, d, page.centre.data(),
            page.distances);
  return page;
}

void EncodeValues(const ModelSpec& spec, const EncodeParams& params, const PageValues& values,
                  const std::byte* rows, std::byte* page) {
  const int d = spec.head_dim;
  std::byte* const centre = page + params.layout.value_centre_offset_bytes();
  FromFloat(DType::kBF16, values.centre.data(), d, centre);
  std::vector<float> wide(d);
  ToFloat(DType::kBF16, centre, d, wide.data());
  const std::byte* const first = rows + spec.element_row_bytes() / 2;
  for (int tile = 0; tile < kTilesPerPage; ++tile) {
    EncodeValueTile(params.layout, *params.signs, spec.dtype,
                    first + tile * kTileTokenCount * spec.element_row_bytes(),
                    spec.element_row_bytes(), wide.data(), page, tile);
  }
}

FirstRows MeasureFirstRows(std::span<const PageValues> pages, const float* radii) {
  FirstRows first;
  first.statistics.median_radius = Median({radii, kCentreTokenCount});
  first.value_centre.resize(pages[0].centre.size());
  for (size_t i = 0; i < first.value_centre.size(); ++i) {
    float of_pages[kFirstPageCount];
    for (int p = 0; p < kFirstPageCount; ++p) of_pages[p] = pages[p].centre[i];
    first.value_centre[i] = Median(of_pages);
  }
  std::vector<float> present;
  for (const PageValues& page : pages) {
    for (const float distance : page.distances) {
      if (distance > 0) present.push_back(distance);
    }
  }
  const float reference = present.empty() ? 1.0f : Median(present);
  double squares = 0;
  for (const PageValues& page : pages) {
    for (const float distance : page.distances) {
      const double ratio = double{distance} / double{reference};
      squares += ratio * ratio;
    }
  }
  first.statistics.value_reference = reference;
  first.statistics.value_unit = PowerOfTwoBelow(reference);
  first.statistics.value_floor = ValueFloor(squares / kCentreTokenCount);
  return first;
}

void WriteNorms(const CodeLayout& layout, const FirstRows& first, const PageValues& values,
                const float* radii, std::byte* page) {
  const HeadStatistics& head = first.statistics;
  const float apart = Distance(values.centre, first.value_centre);
  const int lift = ValueLift(ValueExponent(Median(values.distances), head.value_reference),
                             ValueExponent(apart, head.value_reference), head.value_floor);
  const float median = Median({radii, kPageTokenCount});
  auto* const norms = reinterpret_cast<uint8_t*>(page + layout.norm_offset_bytes());
  for (int t = 0; t < kPageTokenCount; ++t) {
    norms[t] =
        NormByte(IsStray(radii[t], median, head.median_radius),
                 ValueExponent(values.distances[t], head.value_reference), head.value_floor, lift);
  }
}

}  // namespace spillway
