#pragma once

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

namespace spillway {

enum class MetricType { kCounter, kGauge, kHistogram };

// One series of a metric.
struct MetricSeries {
  using Labels = std::vector<std::pair<std::string, std::string>>;

  Labels labels;
  double value = 0;  // of a counter or gauge; the sum of a histogram
  // Of a histogram, for each bucket: its upper bound, the last one infinite, and how many values
  // are at most that.
  std::vector<double> upper_bounds;
  std::vector<int64_t> cumulative_counts;
};

// A metric with all of its series, in Prometheus' terms.
struct MetricFamily {
  std::string name;
  std::string help;
  MetricType type = MetricType::kGauge;
  std::vector<MetricSeries> series;
};

}  // namespace spillway
