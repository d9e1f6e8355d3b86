#pragma once

#include <algorithm>
#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>

namespace spillway {

// How many values fell into which range, without locks: what is counted with every
// attend must not hold one up. Range i is of values in (bounds[i - 1], bounds[i]], the
// last of those above all bounds. Thread-safe, each counter by itself.
template <size_t N>
class Distribution {
 public:
  using Bounds = std::array<double, N>;
  using Counts = std::array<int64_t, N + 1>;

  // Rising bounds.
  explicit Distribution(const Bounds& bounds) : bounds_(bounds) {}

  // The range of a value.
  static size_t RangeOf(const Bounds& bounds, double value) {
    return static_cast<size_t>(std::lower_bound(bounds.begin(), bounds.end(), value) -
                               bounds.begin());
  }
  void Note(double value) {
    counts_[RangeOf(bounds_, value)].fetch_add(1, std::memory_order_relaxed);
    sum_.fetch_add(value, std::memory_order_relaxed);
  }
  // Values that were sorted into ranges already, and their sum.
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

// Seconds, from 20 us to 10 s.
inline constexpr std::array<double, 18> kSecondsBounds = {
    20e-6, 50e-6, 100e-6, 200e-6, 500e-6, 1e-3, 2e-3, 5e-3, 10e-3,
    20e-3, 50e-3, 0.1,    0.2,    0.5,    1,    2,    5,    10};
class SecondsDistribution : public Distribution<kSecondsBounds.size()> {
 public:
  SecondsDistribution() : Distribution(kSecondsBounds) {}
};

}  // namespace spillway
