#include "cli/reading.h"

#include <algorithm>
#include <cmath>

namespace spillway::cli {

Reading::Reading(const std::vector<v1::MetricFamily>& families, SteadyTime time) : time_(time) {
  for (const v1::MetricFamily& family : families) {
    std::vector<Series>& all = families_[family.name()];
    for (const v1::Metric& metric : family.metrics()) {
      Series& series = all.emplace_back();
      series.labels.insert(metric.labels().begin(), metric.labels().end());
      series.value = metric.value();
      const v1::MetricHistogram& histogram = metric.histogram();
      series.upper_bounds.assign(histogram.upper_bounds().begin(), histogram.upper_bounds().end());
      series.cumulative_counts.assign(histogram.cumulative_counts().begin(),
                                      histogram.cumulative_counts().end());
    }
  }
}

const Reading::Series* Reading::Find(const std::string& name, const Labels& labels) const {
  const auto family = families_.find(name);
  if (family == families_.end()) return nullptr;
  for (const Series& series : family->second) {
    if (series.labels == labels) return &series;
  }
  return nullptr;
}

double Reading::Value(const std::string& name, const Labels& labels) const {
  const Series* const series = Find(name, labels);
  return series == nullptr ? 0 : series->value;
}

double Reading::Sum(const std::string& name) const {
  double sum = 0;
  if (const auto family = families_.find(name); family != families_.end()) {
    for (const Series& series : family->second) sum += series.value;
  }
  return sum;
}

std::vector<std::string> Reading::LabelsOf(const std::string& name,
                                           const std::string& label) const {
  std::vector<std::string> values;
  if (const auto family = families_.find(name); family != families_.end()) {
    for (const Series& series : family->second) {
      if (const auto value = series.labels.find(label); value != series.labels.end()) {
        values.push_back(value->second);
      }
    }
  }
  return values;
}

std::optional<double> Reading::Percentile(const Reading* before, const std::string& name,
                                          double part) const {
  const Series* const now = Find(name, {});
  if (now == nullptr || now->cumulative_counts.empty()) return std::nullopt;
  const Series* const then = before == nullptr ? nullptr : before->Find(name, {});
  const auto count = [&](size_t i) {
    const bool known = then != nullptr && i < then->cumulative_counts.size();
    return now->cumulative_counts[i] - (known ? then->cumulative_counts[i] : 0);
  };
  const size_t size = std::min(now->upper_bounds.size(), now->cumulative_counts.size());
  const int64_t total = count(size - 1);
  if (total <= 0) return std::nullopt;
  const double wanted = part * static_cast<double>(total);
  double low = 0;
  int64_t below = 0;
  for (size_t i = 0; i < size; ++i) {
    const double high = now->upper_bounds[i];
    if (static_cast<double>(count(i)) >= wanted && count(i) > below) {
      if (std::isinf(high)) return low;
      return low + (high - low) * (wanted - static_cast<double>(below)) /
                       static_cast<double>(count(i) - below);
    }
    below = count(i);
    low = high;
  }
  return low;
}

double Rate(const Reading& before, const Reading& now, const std::string& name,
            const Reading::Labels& labels) {
  const double seconds = absl::ToDoubleSeconds(absl::FromChrono(now.time() - before.time()));
  const double rise = now.Value(name, labels) - before.Value(name, labels);
  return seconds > 0 && rise > 0 ? rise / seconds : 0;
}

}  // namespace spillway::cli
