#include "services/convert/metrics.h"

namespace spillway {
namespace {

v1::MetricType TypeToProto(MetricType type) {
  switch (type) {
    case MetricType::kCounter:
      return v1::METRIC_TYPE_COUNTER;
    case MetricType::kGauge:
      return v1::METRIC_TYPE_GAUGE;
    case MetricType::kHistogram:
      return v1::METRIC_TYPE_HISTOGRAM;
  }
  return v1::METRIC_TYPE_UNSPECIFIED;
}

}  // namespace

void ToProto(const MetricFamily& family, v1::MetricFamily& out) {
  out.set_name(family.name);
  out.set_help(family.help);
  out.set_type(TypeToProto(family.type));
  for (const MetricSeries& series : family.series) {
    v1::Metric& added = *out.add_metrics();
    for (const auto& [name, value] : series.labels) (*added.mutable_labels())[name] = value;
    if (family.type != MetricType::kHistogram) {
      added.set_value(series.value);
      continue;
    }
    v1::MetricHistogram& histogram = *added.mutable_histogram();
    histogram.set_sum(series.value);
    for (const double bound : series.upper_bounds) histogram.add_upper_bounds(bound);
    for (const int64_t count : series.cumulative_counts) histogram.add_cumulative_counts(count);
  }
}

}  // namespace spillway
