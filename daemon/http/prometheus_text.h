#pragma once

#include <string>
#include <vector>

#include "services/metrics/metric_family.h"

namespace spillway {

// The families in Prometheus' text format, version 0.0.4.
std::string PrometheusText(const std::vector<MetricFamily>& families);

}  // namespace spillway
