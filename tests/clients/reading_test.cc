#include "cli/reading.h"

#include <limits>

#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace spillway::cli {
namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();

v1::MetricFamily Counter(const std::string& name, const std::map<std::string, double>& by_model) {
  v1::MetricFamily family;
  family.set_name(name);
  for (const auto& [model, value] : by_model) {
    v1::Metric& metric = *family.add_metrics();
    if (!model.empty()) (*metric.mutable_labels())["model"] = model;
    metric.set_value(value);
  }
  return family;
}

v1::MetricFamily Histogram(const std::vector<int64_t>& cumulative_counts) {
  v1::MetricFamily family;
  family.set_name("seconds");
  v1::MetricHistogram& histogram = *family.add_metrics()->mutable_histogram();
  for (const double bound : {1.0, 2.0, 4.0, kInfinity}) histogram.add_upper_bounds(bound);
  for (const int64_t count : cumulative_counts) histogram.add_cumulative_counts(count);
  return family;
}

TEST(Reading, ValuesByLabels) {
  const Reading reading({Counter("tokens", {{"a", 3}, {"b", 4}}), Counter("all", {{"", 7}})},
                        SteadyTime());
  EXPECT_EQ(reading.Value("tokens", {{"model", "b"}}), 4);
  EXPECT_EQ(reading.Value("all"), 7);
  EXPECT_EQ(reading.Sum("tokens"), 7);
  EXPECT_EQ(reading.Value("tokens"), 0);
  EXPECT_EQ(reading.Value("none"), 0);
  EXPECT_THAT(reading.LabelsOf("tokens", "model"), testing::ElementsAre("a", "b"));
}

TEST(Reading, RatesAreOfTheTimeBetween) {
  const SteadyTime start;
  const Reading before({Counter("all", {{"", 10}})}, start);
  EXPECT_EQ(
      Rate(before, Reading({Counter("all", {{"", 40}})}, start + std::chrono::seconds(2)), "all"),
      15);
  // A counter that went down: the daemon was restarted.
  EXPECT_EQ(
      Rate(before, Reading({Counter("all", {{"", 4}})}, start + std::chrono::seconds(2)), "all"),
      0);
  EXPECT_EQ(Rate(before, Reading({Counter("all", {{"", 40}})}, start), "all"), 0);
}

TEST(Reading, PercentilesLieWithinTheirRange) {
  const Reading before({Histogram({5, 5, 5, 5})}, SteadyTime());
  // New values: ten up to 1, ten between 2 and 4.
  const Reading now({Histogram({15, 15, 25, 25})}, SteadyTime());
  EXPECT_EQ(now.Percentile(&before, "seconds", 0.25), 0.5);
  EXPECT_EQ(now.Percentile(&before, "seconds", 0.5), 1);
  EXPECT_EQ(now.Percentile(&before, "seconds", 0.75), 3);
  EXPECT_EQ(before.Percentile(&before, "seconds", 0.5), std::nullopt);
  EXPECT_EQ(now.Percentile(nullptr, "none", 0.5), std::nullopt);
  // Above the last finite bound, only that bound is known.
  const Reading slow({Histogram({5, 5, 5, 9})}, SteadyTime());
  EXPECT_EQ(slow.Percentile(&before, "seconds", 0.5), 4);
}

}  // namespace
}  // namespace spillway::cli
