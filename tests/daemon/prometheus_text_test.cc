#include "daemon/http/prometheus_text.h"

#include <gtest/gtest.h>

#include <limits>

namespace spillway {
namespace {

TEST(PrometheusText, HasEachKindOfMetric) {
  const std::vector<MetricFamily> families = {
      {.name = "a_total",
       .help = "Events.",
       .type = MetricType::kCounter,
       .series = {{.labels = {{"why", "idle"}}, .value = 2}, {.labels = {{"why", "x"}}}}},
      {.name = "b", .help = "A size.", .type = MetricType::kGauge, .series = {{.value = 0.5}}},
      {.name = "c_seconds",
       .help = "Times.",
       .type = MetricType::kHistogram,
       .series = {{.value = 1.5,
                   .upper_bounds = {0.25, std::numeric_limits<double>::infinity()},
                   .cumulative_counts = {1, 3}}}},
      {.name = "d", .help = "None yet.", .type = MetricType::kGauge, .series = {}}};
  EXPECT_EQ(PrometheusText(families),
            "# HELP a_total Events.\n"
            "# TYPE a_total counter\n"
            "a_total{why=\"idle\"} 2\n"
            "a_total{why=\"x\"} 0\n"
            "# HELP b A size.\n"
            "# TYPE b gauge\n"
            "b 0.5\n"
            "# HELP c_seconds Times.\n"
            "# TYPE c_seconds histogram\n"
            "c_seconds_count 3\n"
            "c_seconds_sum 1.5\n"
            "c_seconds_bucket{le=\"0.25\"} 1\n"
            "c_seconds_bucket{le=\"+Inf\"} 3\n"
            "# HELP d None yet.\n"
            "# TYPE d gauge\n");
}

}  // namespace
}  // namespace spillway
