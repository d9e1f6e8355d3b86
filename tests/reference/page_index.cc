#include "tests/reference/page_index.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <span>

#include "host/model/model_spec.h"
#include "tests/reference/elements.h"

namespace spillway::reference {
namespace {

constexpr int64_t kFirst = 1024;
constexpr double kFar = 4;  // in units of the median

double Median(std::vector<double> values) {
  std::sort(values.begin(), values.end());
  return values[values.size() / 2];
}

double Distance(std::span<const double> a, std::span<const double> b) {
  double sum = 0;
  for (size_t i = 0; i < a.size(); ++i) sum += (a[i] - b[i]) * (a[i] - b[i]);
  return std::sqrt(sum);
}

// The distance of x from a threshold, as a fraction of the threshold.
double Margin(double x, double threshold) {
  return threshold > 0 ? std::fabs(x / threshold - 1) : std::numeric_limits<double>::infinity();
}

using Vectors = std::vector<std::span<const double>>;

std::vector<double> MeanInBf16(const Vectors& vectors) {
  std::vector<double> mean(vectors[0].size(), 0.0);
  for (size_t i = 0; i < mean.size(); ++i) {
    for (const auto& v : vectors) mean[i] += v[i];
    mean[i] =
        Round(DType::kBF16, static_cast<float>(mean[i] / static_cast<double>(vectors.size())));
  }
  return mean;
}

std::vector<double> Distances(const Vectors& vectors, std::span<const double> centre) {
  std::vector<double> distances;
  for (const auto& v : vectors) distances.push_back(Distance(v, centre));
  return distances;
}

// The mean of a page's keys. If one key lies far from it: the mean of the keys that lie near their
// median per coordinate.
std::vector<double> PageCentre(const Vectors& keys, double& margin) {
  const std::vector<double> mean = MeanInBf16(keys);
  const std::vector<double> radii = Distances(keys, mean);
  const double largest = *std::max_element(radii.begin(), radii.end());
  margin = std::min(margin, Margin(largest, kFar * Median(radii)));
  if (largest <= kFar * Median(radii)) return mean;
  std::vector<double> middle(mean.size());
  for (size_t i = 0; i < middle.size(); ++i) {
    std::vector<double> coordinate;
    for (const auto& key : keys) coordinate.push_back(key[i]);
    middle[i] = Median(coordinate);
  }
  const std::vector<double> about = Distances(keys, middle);
  const double most = kFar * Median(about);
  Vectors near;
  for (size_t t = 0; t < keys.size(); ++t) {
    margin = std::min(margin, Margin(about[t], most));
    if (about[t] <= most) near.push_back(keys[t]);
  }
  return MeanInBf16(near);
}

// round(8 log2(ratio)), at least -127; a range if fp32 may round either way.
BinRange ExponentOf(double ratio) {
  constexpr double kTolerance = 2e-5;
  if (!(ratio > 0)) return {-127, -127};
  const double exact = 8 * std::log2(ratio);
  const auto rounded = [](double e) {
    return std::max(-127, static_cast<int>(std::floor(std::clamp(e, -2000.0, 2000.0) + 0.5)));
  };
  return {rounded(exact - kTolerance), rounded(exact + kTolerance)};
}

// The value centre of the page that begins at `first`: per coordinate the median of the means of
// eight tokens each, rounded to fp32.
std::vector<double> ValueCentre(const KeyValues& kv, int64_t first) {
  std::vector<double> centre;
  for (int i = 0; i < kv.d; ++i) {
    std::vector<double> means;
    for (int64_t run = first; run < first + PageIndex::kPageTokens; run += 8) {
      double sum = 0;
      for (int64_t t = run; t < run + 8; ++t) sum += kv.Value(t)[i];
      means.push_back(static_cast<float>(sum / 8));
    }
    centre.push_back(Median(means));
  }
  return centre;
}

}  // namespace

PageIndex PageIndex::Of(const KeyValues& kv, bool raw_keys) {
  PageIndex index;
  index.margin = std::numeric_limits<double>::infinity();
  const int64_t closed = kv.n / kPageTokens * kPageTokens;
  std::vector<double> page_medians;
  for (int64_t first = 0; first < closed; first += kPageTokens) {
    Vectors keys;
    for (int64_t t = first; t < first + kPageTokens; ++t) keys.push_back(kv.Key(t));
    index.centres.push_back(raw_keys ? std::vector<double>(kv.d, 0.0)
                                     : PageCentre(keys, index.margin));
    const std::vector<double> radii = Distances(keys, index.centres.back());
    page_medians.push_back(Median(radii));
    index.radii.insert(index.radii.end(), radii.begin(), radii.end());
  }
  index.median_radius = Median({index.radii.begin(), index.radii.begin() + kFirst});

  std::vector<double> present;
  for (int64_t first = 0; first < closed; first += kPageTokens) {
    index.value_centres.push_back(ValueCentre(kv, first));
    for (int64_t t = first; t < first + kPageTokens; ++t) {
      index.distances.push_back(Distance(kv.Value(t), index.value_centres.back()));
      if (t < kFirst && index.distances[t] > 0) present.push_back(index.distances[t]);
    }
  }
  for (int i = 0; i < kv.d; ++i) {
    std::vector<double> of_pages;
    for (int page = 0; page < 8; ++page) of_pages.push_back(index.value_centres[page][i]);
    index.value_centre.push_back(Median(of_pages));
  }
  index.value_reference = present.empty() ? 1 : Median(present);
  index.value_unit = std::exp2(std::floor(std::log2(index.value_reference)));
  double square = 0;
  for (int64_t t = 0; t < kFirst; ++t) {
    const double ratio = index.distances[t] / index.value_reference;
    square += ratio * ratio / kFirst;
  }
  const BinRange floor = ExponentOf(std::sqrt(square));
  if (floor.low != floor.high) index.margin = 0;
  index.value_floor = std::min(floor.low, -8);

  for (int64_t t = 0; t < closed; ++t) {
    const double most = kFar * std::max(page_medians[t / kPageTokens], index.median_radius);
    index.margin = std::min(index.margin, Margin(index.radii[t], most));
    index.exponents.push_back(ExponentOf(index.distances[t] / index.value_reference));
    const BinRange& exponent = index.exponents[t];
    if ((exponent.low > 127) != (exponent.high > 127)) index.margin = 0;
    index.strays.push_back(index.radii[t] > most || exponent.low > 127);
  }
  for (int64_t page = 0; page < closed / kPageTokens; ++page) {
    const auto* const distances = index.distances.data() + page * kPageTokens;
    const BinRange usual =
        ExponentOf(Median({distances, distances + kPageTokens}) / index.value_reference);
    const BinRange apart =
        ExponentOf(Distance(index.value_centres[page], index.value_centre) / index.value_reference);
    const auto lift = [&](int from, int to) {
      return std::clamp(to - std::max(from, index.value_floor), 0, 64);
    };
    index.lifts.push_back(lift(usual.low, apart.low));
    if (lift(usual.high, apart.low) != lift(usual.low, apart.high)) index.margin = 0;
    BinRange level = {0, 0};
    for (int64_t t = page * kPageTokens; t < (page + 1) * kPageTokens; ++t) {
      const BinRange norm = index.strays[t] ? BinRange{255, 255} : index.Norm(t);
      level.low += norm.low;
      level.high += norm.high;
    }
    index.levels.push_back(level);
  }
  return index;
}

std::vector<double> PageIndex::Centred(const KeyValues& kv, int64_t token) const {
  std::vector<double> x(kv.Key(token).begin(), kv.Key(token).end());
  for (size_t i = 0; i < x.size(); ++i) x[i] -= CentreOf(token)[i];
  return x;
}

BinRange PageIndex::Norm(int64_t token) const {
  const auto norm = [&](int exponent) {
    return 127 + std::min(127, std::max(exponent, value_floor) + lifts[token / kPageTokens]);
  };
  return {norm(exponents[token].low), norm(exponents[token].high)};
}

BinRange PageIndex::Weigh(BinRange bins, int64_t token, int64_t visible) const {
  if (strays[token]) return {4095, 4095};
  const auto pages = visible == 0 ? static_cast<int64_t>(lifts.size()) : visible / kPageTokens;
  // Of the last page, and of those 1, 3, 7, ... before it.
  std::vector<double> usual_low, usual_high;
  for (int64_t back = 1; back <= pages; back *= 2) {
    usual_low.push_back(levels[pages - back].low);
    usual_high.push_back(levels[pages - back].high);
  }
  const auto raise = [&](double usual, int own) {
    return usual > own ? (static_cast<int>(usual) - own) / 128 : 0;
  };
  const int64_t page = token / kPageTokens;
  const BinRange norm = Norm(token);
  const int low = norm.low - 127 + raise(Median(usual_low), levels[page].high);
  const int high = norm.high - 127 + raise(Median(usual_high), levels[page].low);
  return {std::clamp(bins.low + 2 * low, 1, 4094), std::clamp(bins.high + 2 * high, 1, 4094)};
}

int64_t ScoredEndByPages(int64_t n, int64_t window) {
  return std::min(n - window, n / PageIndex::kPageTokens * PageIndex::kPageTokens);
}

}  // namespace spillway::reference
