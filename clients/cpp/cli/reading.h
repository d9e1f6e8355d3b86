// Metrics of one moment, and what two of them say of the time between.
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "absl/time/time.h"
#include "spillway/v1/admin_service.pb.h"

namespace spillway::cli {

class Reading {
 public:
  using Labels = std::map<std::string, std::string>;

  Reading(const std::vector<v1::MetricFamily>& families, absl::Time time);

  absl::Time time() const { return time_; }
  // Of a counter or gauge; 0 where there is none.
  double Value(const std::string& name, const Labels& labels = {}) const;
  // Of all its series.
  double Sum(const std::string& name) const;
  // The values of a label, in order.
  std::vector<std::string> LabelsOf(const std::string& name, const std::string& label) const;
  // Of a histogram without labels, counted since `before`; nothing where nothing was.
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

  absl::Time time_;
  std::map<std::string, std::vector<Series>> families_;
};

// How fast a counter rose, a second; 0 where no time has passed or the daemon began anew.
double Rate(const Reading& before, const Reading& now, const std::string& name,
            const Reading::Labels& labels = {});

}  // namespace spillway::cli
