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

struct FirstPages {
  HeadStatistics statistics;
  std::vector<float> value_centre;
};

// Measures the first kCentreTokenCount values, and the distances of the keys from the centres of
// their pages.
inline FirstPages Measure(const Vectors& values, const std::vector<float>& radii) {
  constexpr int64_t kRun = kCentreTokenCount / kValueBlockCount;
  const size_t d = values[0].size();
  FirstPages first;
  for (size_t i = 0; i < d; ++i) {
    const std::vector<float> all = Coordinate(values, i);
    std::vector<float> means;
    for (int64_t at = 0; at < kCentreTokenCount; at += kRun) {
      means.push_back(Mean(std::span(all).subspan(static_cast<size_t>(at), kRun)));
    }
    first.value_centre.push_back(Median(means));
  }
  const std::vector<float> distances = Distances(values, first.value_centre);
  std::vector<float> present;
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

// The norm bytes of a page.
inline std::vector<uint8_t> Norms(const FirstPages& first, const std::vector<float>& radii,
                                  const Vectors& values) {
  const float usual = std::max(Median(radii), first.statistics.median_radius);
  std::vector<uint8_t> norms;
  for (size_t t = 0; t < values.size(); ++t) {
    const bool stray = radii[t] > 4 * usual;
    const float distance = Distance(values[t], first.value_centre);
    norms.push_back(NormByte(stray, ValueExponent(distance, first.statistics.value_reference)));
  }
  return norms;
}

// The index of a KV head: its closed pages.
struct Page {
  std::vector<float> centre;
  std::vector<float> radii;
  std::vector<uint8_t> norms;
};
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
  for (int64_t p = 0; p < ClosedPages(static_cast<int64_t>(keys.size())); ++p) {
    const Vectors of_page = part(keys, p * kPageTokenCount, kPageTokenCount);
    Page page;
    page.centre = PageCentre(of_page, raw_keys);
    page.radii = Distances(of_page, page.centre);
    radii.insert(radii.end(), page.radii.begin(), page.radii.end());
    head.pages.push_back(std::move(page));
  }
  radii.resize(kCentreTokenCount);
  head.first = Measure(part(values, 0, kCentreTokenCount), radii);
  for (size_t p = 0; p < head.pages.size(); ++p) {
    Page& page = head.pages[p];
    page.norms = Norms(head.first, page.radii,
                       part(values, static_cast<int64_t>(p) * kPageTokenCount, kPageTokenCount));
  }
  return head;
}

}  // namespace spillway::reference
