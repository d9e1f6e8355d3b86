#include "daemon/convert/metrics.h"

namespace spillway {
namespace {

v1::MetricType TypeToProto(prometheus::MetricType type) {
  switch (type) {
    case prometheus::MetricType::Counter:
      return v1::METRIC_TYPE_COUNTER;
    case prometheus::MetricType::Gauge:
      return v1::METRIC_TYPE_GAUGE;
    case prometheus::MetricType::Histogram:
      return v1::METRIC_TYPE_HISTOGRAM;
    default:
      return v1::METRIC_TYPE_UNSPECIFIED;
  }
}

}  // namespace

void ToProto(const prometheus::MetricFamily& family, v1::MetricFamily& out) {
  out.set_name(family.name);
  out.set_help(family.help);
  out.set_type(TypeToProto(family.type));
  for (const prometheus::ClientMetric& metric : family.metric) {
    v1::Metric& added = *out.add_metrics();
    for (const auto& label : metric.label) (*added.mutable_labels())[label.name] = label.value;
    if (family.type != prometheus::MetricType::Histogram) {
      added.set_value(family.type == prometheus::MetricType::Counter ? metric.counter.value
                                                                     : metric.gauge.value);
      continue;
    }
    v1::MetricHistogram& histogram = *added.mutable_histogram();
    histogram.set_sum(metric.histogram.sample_sum);
    for (const auto& bucket : metric.histogram.bucket) {
      histogram.add_upper_bounds(bucket.upper_bound);
      histogram.add_cumulative_counts(static_cast<int64_t>(bucket.cumulative_count));
    }
  }
}

}  // namespace spillway
