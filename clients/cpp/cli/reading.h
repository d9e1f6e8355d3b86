// Metrics at one moment, and rates and percentiles between two moments.
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "host/base/steady_time.h"
#include "spillway/v1/admin_service.pb.h"

namespace spillway::cli {

class Reading {
 public:
  using Labels = std::map<std::string, std::string>;

  Reading(const std::vector<v1::MetricFamily>& families, SteadyTime time);

  SteadyTime time() const { return time_; }
  // Value of a counter or gauge; 0 if it does not exist.
  double Value(const std::string& name, const Labels& labels = {}) const;
  // Sum over all series of a metric.
  double Sum(const std::string& name) const;
  // The values of a label, in the order of the series.
  std::vector<std::string> LabelsOf(const std::string& name, const std::string& label) const;
  // Percentile of a histogram without labels, over the observations since `before` (null: all).
  // part: in [0, 1]. nullopt if there are no observations.
  std::optional<double> Percentile(const Reading* before, const std::string& name,
                                   double part) const;

 private:
  struct Series {
    Labels labels;
    double value = 0;
    std::vector<double> upper_bounds;
    std::vector<int64_t> cumulative_counts;
  };

  const Series* Find(const std::string& name, const Labels& labels) const;

  SteadyTime time_;
  std::map<std::string, std::vector<Series>> families_;
};

// Increase of a counter per second; 0 if no time has passed or the daemon has restarted.
double Rate(const Reading& before, const Reading& now, const std::string& name,
            const Reading::Labels& labels = {});

}  // namespace spillway::cli
