#pragma once

#include "services/metrics/metric_family.h"
#include "spillway/v1/admin_service.pb.h"

namespace spillway {

void ToProto(const MetricFamily& family, v1::MetricFamily& out);

}  // namespace spillway
