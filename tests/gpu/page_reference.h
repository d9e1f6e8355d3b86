#pragma once

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>
#include <span>
#include <vector>

#include "host/base/elements.h"
#include "host/core/page_index.h"
#include "host/core/quantiser.h"

// The page index of one KV head as host/core/page_index.h describes it, computed one vector at a
// time. The GPU must give the same bits.
namespace spillway::reference {

using Vectors = std::vector<std::vector<float>>;

inline float Median(std::vector<float> numbers) {
  std::sort(numbers.begin(), numbers.end());
  return numbers[numbers.size() / 2];
}

inline uint16_t ToBFloat16(float x) {
  uint16_t bits;
  FromFloat(DType::kBF16, &x, 1, reinterpret_cast<std::byte*>(&bits));
  return bits;
}
inline float Widened(uint16_t bits) {
  return std::bit_cast<float>(static_cast<uint32_t>(bits) << 16);
}

inline float Distance(std::span<const float> x, std::span<const float> centre) {
  float largest = 0, sum = 0;
  for (size_t i = 0; i < x.size(); ++i) largest = std::max(largest, std::abs(x[i] - centre[i]));
  if (largest == 0) return 0;
  for (size_t i = 0; i < x.size(); ++i) {
    const float r = (x[i] - centre[i]) / largest;
    sum = std::fma(r, r, sum);
  }
  return largest * std::sqrt(sum);
}
inline std::vector<float> Distances(const Vectors& vectors, std::span<const float> centre) {
  std::vector<float> distances;
  for (const std::vector<float>& x : vectors) distances.push_back(Distance(x, centre));
  return distances;
}

// Element i of all vectors.
inline std::vector<float> Coordinate(const Vectors& vectors, size_t i) {
  std::vector<float> numbers;
  for (const std::vector<float>& x : vectors) numbers.push_back(x[i]);
  return numbers;
}

inline float Mean(std::span<const float> numbers) {
  double sum = 0;
  for (const float x : numbers) sum += x;
  return static_cast<float>(sum / static_cast<double>(numbers.size()));
}

// The mean of vectors per coordinate, rounded to bf16.
inline std::vector<float> RoundedMean(const Vectors& vectors) {
  std::vector<float> mean(vectors[0].size());
  for (size_t i = 0; i < mean.size(); ++i) {
    mean[i] = Widened(ToBFloat16(Mean(Coordinate(vectors, i))));
  }
  return mean;
}

// The centre of a page's keys.
inline std::vector<float> PageCentre(const Vectors& keys, bool raw_keys) {
  if (raw_keys) return std::vector<float>(keys[0].size(), 0.0f);
  const std::vector<float> mean = RoundedMean(keys);
  const std::vector<float> radii = Distances(keys, mean);
  if (!(*std::max_element(radii.begin(), radii.end()) > 4 * Median(radii))) return mean;
  std::vector<float> medians;
  for (size_t i = 0; i < mean.size(); ++i) medians.push_back(Median(Coordinate(keys, i)));
  const std::vector<float> from_medians = Distances(keys, medians);
  const float most = 4 * Median(from_medians);
  Vectors near;
  for (size_t t = 0; t < keys.size(); ++t) {
    if (from_medians[t] <= most) near.push_back(keys[t]);
  }
  return RoundedMean(near);
}

struct KeyCode {
  std::vector<int> levels;
  uint16_t factor = 0;
};

// The code of a key relative to a centre; rotation: P [d][d].
inline KeyCode CodeOf(std::span<const float> key, std::span<const float> centre,
                      std::span<const float> rotation, int bits) {
  const size_t d = key.size();
  const float step = QuantiserStep(bits);
  const float scale = std::sqrt(static_cast<float>(d)) / step;
  const auto half = static_cast<float>(1 << (bits - 1));
  float largest = 0, norm_sq = 0, dot = 0;
  std::vector<float> o(d);
  for (size_t i = 0; i < d; ++i) largest = std::max(largest, std::abs(key[i] - centre[i]));
  for (size_t i = 0; i < d; ++i) {
    o[i] = (key[i] - centre[i]) / (largest > 0 ? largest : 1);
    norm_sq = std::fma(o[i], o[i], norm_sq);
  }
  const float norm = std::sqrt(largest > 0 ? norm_sq : 1);
  for (float& x : o) x *= 1 / norm;
  KeyCode code;
  for (size_t j = 0; j < d; ++j) {
    float y = 0;
    for (size_t i = 0; i < d; ++i) y = std::fma(rotation[j * d + i], o[i], y);
    const float level = std::clamp(std::floor(y * scale) + half, 0.0f, 2 * half - 1);
    dot = std::fma(y, level - (half - 0.5f), dot);
    code.levels.push_back(static_cast<int>(level));
  }
  if (largest > 0 && dot > 0) {
    code.factor = ToBFloat16(std::min(largest * norm / (dot * step), 3.0e38f));
  }
  return code;
}

// The value centre of a page, and the distances of its values from it.
struct PageValues {
  std::vector<float> centre;
  std::vector<float> distances;
};
inline PageValues MeasurePage(const Vectors& values) {
  PageValues page;
  for (size_t i = 0; i < values[0].size(); ++i) {
    const std::vector<float> all = Coordinate(values, i);
    std::vector<float> means;
    for (size_t at = 0; at < all.size(); at += 8)
      means.push_back(Mean(std::span(all).subspan(at, 8)));
    page.centre.push_back(Median(means));
  }
  page.distances = Distances(values, page.centre);
  return page;
}

struct FirstPages {
  HeadStatistics statistics;
  std::vector<float> value_centre;
};

// Measures the first pages: their values, and the distances of the keys from the centres.
inline FirstPages Measure(std::span<const PageValues> pages, const std::vector<float>& radii) {
  FirstPages first;
  for (size_t i = 0; i < pages[0].centre.size(); ++i) {
    std::vector<float> of_pages;
    for (const PageValues& page : pages) of_pages.push_back(page.centre[i]);
    first.value_centre.push_back(Median(of_pages));
  }
  std::vector<float> distances, present;
  for (const PageValues& page : pages) {
    distances.insert(distances.end(), page.distances.begin(), page.distances.end());
  }
  std::copy_if(distances.begin(), distances.end(), std::back_inserter(present),
               [](float x) { return x != 0; });
  const float reference = present.empty() ? 1.0f : Median(present);
  double squares = 0;
  for (const float x : distances) {
    const double ratio = double{x} / double{reference};
    squares += ratio * ratio;
  }
  first.statistics = {Median(radii), reference, PowerOfTwoBelow(reference),
                      ValueFloor(squares / static_cast<double>(kCentreTokenCount))};
  return first;
}

// The index of a KV head: its closed pages.
struct Page {
  std::vector<float> centre;
  std::vector<float> radii;
  PageValues values;
  std::vector<uint8_t> norms;
};

// Sets the norm bytes of a page.
inline void SetNorms(const FirstPages& first, Page& page) {
  const HeadStatistics& head = first.statistics;
  const float usual = std::max(Median(page.radii), head.median_radius);
  const int exponent = ValueExponent(Median(page.values.distances), head.value_reference);
  const int apart =
      ValueExponent(Distance(page.values.centre, first.value_centre), head.value_reference);
  const int lift = std::clamp(apart - std::max(exponent, head.value_floor), 0, 64);
  for (size_t t = 0; t < page.radii.size(); ++t) {
    const int of_value = ValueExponent(page.values.distances[t], head.value_reference);
    const int lifted = std::min(127, std::max(of_value, head.value_floor) + lift);
    const bool stray = page.radii[t] > 4 * usual || of_value > 127;
    page.norms.push_back(static_cast<uint8_t>(stray ? 255 : lifted + 127));
  }
}
struct Head {
  std::vector<Page> pages;
  FirstPages first;
};
// keys and values: of at least kCentreTokenCount tokens.
inline Head IndexOf(const Vectors& keys, const Vectors& values, bool raw_keys) {
  const auto part = [](const Vectors& all, int64_t first, int64_t count) {
    return Vectors(all.begin() + first, all.begin() + first + count);
  };
  Head head;
  std::vector<float> radii;
  std::vector<PageValues> first_values;
  for (int64_t p = 0; p < ClosedPages(static_cast<int64_t>(keys.size())); ++p) {
    const Vectors of_page = part(keys, p * kPageTokenCount, kPageTokenCount);
    Page page;
    page.centre = PageCentre(of_page, raw_keys);
    page.radii = Distances(of_page, page.centre);
    page.values = MeasurePage(part(values, p * kPageTokenCount, kPageTokenCount));
    radii.insert(radii.end(), page.radii.begin(), page.radii.end());
    if (p < kFirstPageCount) first_values.push_back(page.values);
    head.pages.push_back(std::move(page));
  }
  radii.resize(kCentreTokenCount);
  head.first = Measure(first_values, radii);
  for (Page& page : head.pages) SetNorms(head.first, page);
  return head;
}

}  // namespace spillway::reference
