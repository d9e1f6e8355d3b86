#include "daemon/http/prometheus_text.h"

#include <utility>

#include "prometheus/metric_family.h"
#include "prometheus/text_serializer.h"

namespace spillway {
namespace {

prometheus::MetricType TypeOf(MetricType type) {
  switch (type) {
    case MetricType::kCounter:
      return prometheus::MetricType::Counter;
    case MetricType::kGauge:
      return prometheus::MetricType::Gauge;
    case MetricType::kHistogram:
      return prometheus::MetricType::Histogram;
  }
  return prometheus::MetricType::Untyped;
}

prometheus::ClientMetric Convert(const MetricSeries& series, MetricType type) {
  prometheus::ClientMetric metric;
  for (const auto& [name, value] : series.labels) metric.label.push_back({name, value});
  if (type == MetricType::kCounter) metric.counter.value = series.value;
  if (type == MetricType::kGauge) metric.gauge.value = series.value;
  if (type == MetricType::kHistogram) {
    for (size_t i = 0; i < series.upper_bounds.size(); ++i) {
      metric.histogram.bucket.push_back(
          {static_cast<uint64_t>(series.cumulative_counts[i]), series.upper_bounds[i]});
    }
    metric.histogram.sample_count = metric.histogram.bucket.back().cumulative_count;
    metric.histogram.sample_sum = series.value;
  }
  return metric;
}

}  // namespace

std::string PrometheusText(const std::vector<MetricFamily>& families) {
  std::vector<prometheus::MetricFamily> converted;
  for (const MetricFamily& family : families) {
    prometheus::MetricFamily& added = converted.emplace_back(
        family.name, family.help, TypeOf(family.type), std::vector<prometheus::ClientMetric>());
    for (const MetricSeries& series : family.series) {
      added.metric.push_back(Convert(series, family.type));
    }
  }
  return prometheus::TextSerializer().Serialize(converted);
}

}  // namespace spillway
