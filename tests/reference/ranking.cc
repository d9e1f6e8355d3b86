#include "tests/reference/ranking.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <limits>
#include <numbers>
#include <numeric>

namespace spillway::reference {

int ScoreBin(double score) {
  return static_cast<int>(std::bit_cast<uint32_t>(static_cast<float>(score)) >> 19);
}

namespace {

// Whether token t is in the sample that gives the reference of scores from `begin` to `end`.
bool InSample(int64_t t, int64_t begin, int64_t end, const std::vector<bool>& left_out) {
  if (!left_out.empty() && left_out[t]) return false;
  const int64_t step = std::clamp<int64_t>(((end - 1) / 128 - begin / 128) / 16, 1, 64);
  return (t / 128 - begin / 128) % step == 0;
}

// M of HeadScores().
double LargestOf(std::span<const double> logits, int64_t begin, int64_t end,
                 const std::vector<bool>& left_out, std::span<const double> centres) {
  double max = -std::numeric_limits<double>::infinity();
  for (int64_t t = begin; t < end; ++t) {
    if (InSample(t, begin, end, left_out)) max = std::max(max, logits[t]);
  }
  for (int64_t page = begin / 128; !centres.empty() && page * 128 < end; ++page) {
    max = std::max(max, centres[page]);
  }
  return max;
}

}  // namespace

std::vector<double> HeadScores(std::span<const double> logits, int64_t begin, int64_t end,
                               const std::vector<bool>& left_out, std::span<const double> centres) {
  const double max = LargestOf(logits, begin, end, left_out, centres);
  std::vector<double> scores;
  for (int64_t t = begin; t < end; ++t) {
    scores.push_back(std::exp2(std::clamp((logits[t] - max) / std::numbers::ln2, -90.0, 80.0)));
  }
  return scores;
}

std::vector<double> GroupScores(std::span<const std::vector<double>> logits, int64_t begin,
                                int64_t end, const std::vector<bool>& left_out,
                                std::span<const std::vector<double>> centres) {
  std::vector<std::vector<double>> heads;
  std::vector<double> of_sample, of_all;
  for (size_t h = 0; h < logits.size(); ++h) {
    const std::span<const double> of_pages =
        centres.empty() ? std::span<const double>() : centres[h];
    heads.push_back(HeadScores(logits[h], begin, end, left_out, of_pages));
    double sample = 0, all = 0;
    for (int64_t t = begin; t < end; ++t) {
      if (InSample(t, begin, end, left_out)) sample += heads[h][t - begin];
      if (left_out.empty() || !left_out[t]) all += heads[h][t - begin];
    }
    const double max = LargestOf(logits[h], begin, end, left_out, of_pages);
    for (int64_t page = begin / 128; !of_pages.empty() && page * 128 < end; ++page) {
      sample += 2 * std::exp(of_pages[page] - max);
    }
    of_sample.push_back(sample);
    of_all.push_back(all);
  }
  double least = of_all[0] / of_sample[0], most = least;
  for (size_t h = 0; h < heads.size(); ++h) {
    least = std::min(least, of_all[h] / of_sample[h]);
    most = std::max(most, of_all[h] / of_sample[h]);
  }
  const double smallest = *std::min_element(of_all.begin(), of_all.end());
  const bool weighs_anew = !centres.empty() && most > 64 * least;
  std::vector<double> group(end - begin, 0.0);
  for (size_t h = 0; h < heads.size(); ++h) {
    for (size_t i = 0; i < group.size(); ++i) {
      group[i] += heads[h][i] * (weighs_anew ? smallest / of_all[h] : 1 / of_sample[h]);
    }
  }
  return group;
}

BinRange RangeOf(double score, double relative_tolerance) {
  return {ScoreBin(score * (1 - relative_tolerance)), ScoreBin(score * (1 + relative_tolerance))};
}

std::vector<Membership> TopK(std::span<const BinRange> bins, int64_t k) {
  const int64_t n = static_cast<int64_t>(bins.size());
  // For each token, the number of tokens whose low (high) end is larger, or equal and more recent.
  const auto before = [&](auto end_of, auto key) {
    std::vector<std::pair<int, int64_t>> ends;
    for (int64_t t = 0; t < n; ++t) ends.push_back({end_of(bins[t]), t});
    std::sort(ends.begin(), ends.end());
    std::vector<int64_t> count(n);
    for (int64_t t = 0; t < n; ++t) {
      const auto at = std::upper_bound(ends.begin(), ends.end(), std::pair(key(bins[t]), t));
      count[t] = ends.end() - at;
    }
    return count;
  };
  const auto low = [](const BinRange& b) { return b.low; };
  const auto high = [](const BinRange& b) { return b.high; };
  const std::vector<int64_t> surely_before = before(low, high);
  std::vector<int64_t> maybe_before = before(high, low);
  std::vector<Membership> result(n, Membership::kOpen);
  for (int64_t t = 0; t < n; ++t) {
    // A token does not count itself: its high end may be above its low end.
    if (bins[t].high > bins[t].low) --maybe_before[t];
    if (maybe_before[t] < k) result[t] = Membership::kIn;
    if (surely_before[t] >= k) result[t] = Membership::kOut;
  }
  return result;
}

namespace {

// Positions by falling bin; among equals, the most recent first.
std::vector<int64_t> Ordered(std::span<const int> bins) {
  std::vector<int64_t> order(bins.size());
  std::iota(order.begin(), order.end(), int64_t{0});
  std::sort(order.begin(), order.end(),
            [&](int64_t a, int64_t b) { return bins[a] != bins[b] ? bins[a] > bins[b] : a > b; });
  return order;
}

std::vector<int64_t> First(std::vector<int64_t> order, int64_t k) {
  order.resize(std::min<int64_t>(k, order.size()));
  std::sort(order.begin(), order.end());
  return order;
}

}  // namespace

std::vector<int64_t> ExactTopK(std::span<const int> bins, int64_t k) {
  return First(Ordered(bins), k);
}

std::vector<int64_t> ExactTopP(std::span<const int> bins, double mass, int64_t floor,
                               int64_t ceiling) {
  const auto centre = [](int bin) {
    const double low = std::bit_cast<float>(static_cast<uint32_t>(bin) << 19);
    const double high = std::bit_cast<float>(static_cast<uint32_t>(bin + 1) << 19);
    return (low + high) / 2;
  };
  double total = 0;
  for (int bin : bins) total += centre(bin);
  const std::vector<int64_t> order = Ordered(bins);
  double reached = 0;
  int64_t k = 0;
  while (k < static_cast<int64_t>(order.size()) && reached < mass * total) {
    reached += centre(bins[order[k++]]);
  }
  return First(order, std::clamp(k, floor, ceiling));
}

std::vector<int> CutIntoStrata(std::span<const int> bins, int64_t k) {
  const std::vector<int64_t> order = Ordered(bins);
  const int64_t tail = static_cast<int64_t>(order.size());
  std::vector<int> stratum(tail);
  int current = 0;
  int64_t edge = 2 * k;
  bool last = false;
  for (int64_t i = 0; i < tail; ++i) {
    stratum[order[i]] = current;
    const bool border = i + 1 < tail && bins[order[i + 1]] != bins[order[i]];
    const int64_t rank = k + i + 1;
    if (last || !border || rank < edge) continue;
    ++current;
    last = (tail - i - 1) * 10 < tail;
    while (edge <= rank) edge *= 2;
  }
  return stratum;
}

}  // namespace spillway::reference
