#pragma once

#include <algorithm>
#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>

namespace spillway {

// Counts how many values fall into each range. Uses no locks, because values are counted on every
// attend. Range i holds values in (bounds[i - 1], bounds[i]]; the last range holds values above all
// bounds. Thread-safe, but each counter is updated separately.
template <size_t N>
class Distribution {
 public:
  using Bounds = std::array<double, N>;
  using Counts = std::array<int64_t, N + 1>;

  // bounds: in ascending order.
  explicit Distribution(const Bounds& bounds) : bounds_(bounds) {}

  // Index of the range that holds `value`.
  static size_t RangeOf(const Bounds& bounds, double value) {
    return static_cast<size_t>(std::lower_bound(bounds.begin(), bounds.end(), value) -
                               bounds.begin());
  }
  void Note(double value) {
    counts_[RangeOf(bounds_, value)].fetch_add(1, std::memory_order_relaxed);
    sum_.fetch_add(value, std::memory_order_relaxed);
  }
  // Adds values that were already sorted into ranges, and their sum.
  void Add(const Counts& counts, double sum) {
    for (size_t i = 0; i <= N; ++i) {
      if (counts[i] != 0) counts_[i].fetch_add(counts[i], std::memory_order_relaxed);
    }
    if (sum != 0) sum_.fetch_add(sum, std::memory_order_relaxed);
  }

  const Bounds& bounds() const { return bounds_; }
  Counts counts() const {
    Counts counts;
    for (size_t i = 0; i <= N; ++i) counts[i] = counts_[i].load(std::memory_order_relaxed);
    return counts;
  }
  double sum() const { return sum_.load(std::memory_order_relaxed); }

 private:
  const Bounds bounds_;
  std::array<std::atomic<int64_t>, N + 1> counts_{};
  std::atomic<double> sum_{0};
};

// In seconds, from 20 us to 10 s.
inline constexpr std::array<double, 18> kSecondsBounds = {
    20e-6, 50e-6, 100e-6, 200e-6, 500e-6, 1e-3, 2e-3, 5e-3, 10e-3,
    20e-3, 50e-3, 0.1,    0.2,    0.5,    1,    2,    5,    10};
class SecondsDistribution : public Distribution<kSecondsBounds.size()> {
 public:
  SecondsDistribution() : Distribution(kSecondsBounds) {}
};

}  // namespace spillway
