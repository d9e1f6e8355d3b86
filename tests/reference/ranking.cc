#include "tests/reference/ranking.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <limits>
#include <numeric>

namespace spillway::reference {

int ScoreBin(double score) {
  return static_cast<int>(std::bit_cast<uint32_t>(static_cast<float>(score)) >> 19);
}

namespace {

// Whether the references of scores from `begin` to `end` are taken over t.
bool InSample(int64_t t, int64_t begin, int64_t end, const std::vector<bool>& left_out) {
  if (!left_out.empty() && left_out[t]) return false;
  const int64_t step = std::clamp<int64_t>(((end - 1) / 128 - begin / 128) / 16, 1, 64);
  return (t / 128 - begin / 128) % step == 0;
}

}  // namespace

std::vector<double> HeadScores(std::span<const double> logits, int64_t begin, int64_t end,
                               const std::vector<bool>& left_out) {
  double max = -std::numeric_limits<double>::infinity();
  for (int64_t t = begin; t < end; ++t) {
    if (InSample(t, begin, end, left_out)) max = std::max(max, logits[t]);
  }
  std::vector<double> scores;
  for (int64_t t = begin; t < end; ++t) {
    scores.push_back(std::exp(std::min(logits[t] - max, 20.0)));
  }
  return scores;
}

std::vector<double> GroupScores(std::span<const std::vector<double>> logits, int64_t begin,
                                int64_t end, const std::vector<bool>& left_out) {
  std::vector<double> group(end - begin, 0.0);
  for (const std::vector<double>& head : logits) {
    const std::vector<double> scores = HeadScores(head, begin, end, left_out);
    double mass = 0;
    for (int64_t t = begin; t < end; ++t) {
      if (InSample(t, begin, end, left_out)) mass += scores[t - begin];
    }
    for (size_t i = 0; i < group.size(); ++i) group[i] += scores[i] / mass;
  }
  return group;
}

BinRange RangeOf(double score, double relative_tolerance) {
  return {ScoreBin(score * (1 - relative_tolerance)), ScoreBin(score * (1 + relative_tolerance))};
}

std::vector<Membership> TopK(std::span<const BinRange> bins, int64_t k) {
  const int64_t n = static_cast<int64_t>(bins.size());
  // How many tokens have a low (high) end above, or equal and more recent.
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
    // A token's own high end may lie above its low end.
    if (bins[t].high > bins[t].low) --maybe_before[t];
    if (maybe_before[t] < k) result[t] = Membership::kIn;
    if (surely_before[t] >= k) result[t] = Membership::kOut;
  }
  return result;
}

namespace {

// Positions by falling bin, the most recent first among equals.
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
