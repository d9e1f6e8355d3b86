#include "services/metrics/metrics.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <map>
#include <set>

#include "absl/strings/str_cat.h"
#include "tests/services/metrics_fixture.h"

namespace spillway {
namespace {

TEST_F(MetricsTest, FamiliesFollowPrometheussNames) {
  std::set<std::string> names;
  for (const MetricFamily& family : metrics.Collect()) {
    EXPECT_TRUE(names.insert(family.name).second) << family.name << " is there twice";
    EXPECT_THAT(family.name, testing::StartsWith("spillway_"));
    EXPECT_EQ(family.name.ends_with("_total"), family.type == MetricType::kCounter) << family.name;
    EXPECT_THAT(family.help, testing::EndsWith(".")) << family.name;
  }
}

TEST_F(MetricsTest, ExpiriesAreCountedByWhy) {
  const auto expired = [this] {
    std::map<std::string, double> counts;
    for (const auto& metric : Family("spillway_sequences_expired_total").series) {
      counts[metric.labels.at(0).second] = metric.value;
    }
    return counts;
  };
  const std::shared_ptr<Presence> client = engine->ClientOf("c");
  engine->clients().Come(*client);
  EXPECT_EQ(Value("spillway_clients"), 1);
  NewSequence("a", absl::Seconds(10));
  for (const char* id : {"b", "c"}) {
    ASSERT_TRUE(
        engine->CreateSequence(id, model, model->policy, absl::Hours(1), {false, client}).ok());
  }
  engine->ClientGoes(*client);
  EXPECT_EQ(Value("spillway_clients"), 0);
  now += std::chrono::seconds(60);
  EXPECT_EQ(engine->SweepExpired().size(), 3);
  EXPECT_EQ(expired(), (std::map<std::string, double>{{"idle", 1}, {"abandoned", 2}}));
}

TEST_F(MetricsTest, WhatIsCountedIsTold) {
  const auto sequence = NewSequence("a");
  ASSERT_TRUE(Fill(sequence, Rows(0, 40, 2), 0, 40).ok());
  Attend(sequence);
  Attend(sequence);
  EXPECT_EQ(Value("spillway_attends_total"), 2);
  EXPECT_EQ(Value("spillway_rows_visible_total"), 80);
  EXPECT_EQ(Value("spillway_rows_appended_total"), 80);
  EXPECT_EQ(Value("spillway_tokens"), 40);
  EXPECT_EQ(Value("spillway_sequences"), 1);
  EXPECT_EQ(Value("spillway_connections"), 3);
  EXPECT_EQ(Value("spillway_connections_shed_total"), 2);
  EXPECT_EQ(Value("spillway_connections_ended_total"), 6);
  EXPECT_EQ(Value("spillway_open_calls"), 5);
  EXPECT_EQ(Value("spillway_open_streams"), 4);
  EXPECT_EQ(Value("spillway_draining"), 1);
  EXPECT_EQ(Value("spillway_drain_left_seconds"), 2.5);
  EXPECT_EQ(Value("spillway_log_lines_dropped_total"), 1);
  EXPECT_EQ(Value("spillway_start_time_seconds"), 1000);
  EXPECT_EQ(Value("spillway_memory_limit_bytes"), 64 << 20);
  const auto histogram = Family("spillway_attend_duration_seconds").series.at(0);
  EXPECT_EQ(histogram.cumulative_counts.back(), 2);
  EXPECT_TRUE(std::isinf(histogram.upper_bounds.back()));
}

TEST_F(MetricsTest, MovedRowsAreTold) {
  const auto sequence = NewSequence("a");
  ASSERT_TRUE(Fill(sequence, Rows(0, 40, 2), 0, 40).ok());
  device.moved_row_count = 3;
  Attend(sequence);
  device.moved_row_count = 4;
  Attend(sequence);
  EXPECT_EQ(Value("spillway_rows_moved_total"), 7);
  EXPECT_EQ(Value("spillway_link_bytes_total"), 7 * 2 * 16 * 4) << "K and V of 16 floats each";
  // Of each sequence of a job.
  const auto other = NewSequence("b");
  ASSERT_TRUE(Fill(other, Rows(0, 40, 2), 0, 40).ok());
  device.moved_row_count = 5;
  Attend({sequence, other});
  EXPECT_EQ(Value("spillway_rows_moved_total"), 17);
  EXPECT_EQ(Value("spillway_link_bytes_total"), 17 * 2 * 16 * 4);
}

// A layer's attends take the time of their job once, and share it.
TEST_F(MetricsTest, DeviceTimesAreTold) {
  const auto a = NewSequence("a"), b = NewSequence("b");
  for (const auto& sequence : {a, b}) {
    ASSERT_TRUE(Fill(sequence, Rows(0, 40, 2), 0, 40).ok());
  }
  device.device_time_us = 600;
  Attend(a);
  // The device has joined the job with others.
  device.device_time_us = 9000;
  device.batch_item_count = 6;
  Attend({a, b});
  const auto histogram = Family("spillway_attend_device_seconds").series.at(0);
  EXPECT_EQ(histogram.cumulative_counts.back(), 2);
  EXPECT_DOUBLE_EQ(histogram.value, 9600 / 1e6);
  EXPECT_EQ(a->work.attend_time_us, 2100);
  EXPECT_EQ(b->work.attend_time_us, 1500);
}

TEST_F(MetricsTest, StagesAndWaitsForTheDeviceAreTold) {
  const auto sequence = NewSequence("a");
  ASSERT_TRUE(Fill(sequence, Rows(0, 40, 2), 0, 40).ok());
  // Stages with other names, which a GPU reports for benchmarks only, are not exported.
  device.stages = {{"score", 3000}, {"pilot", 7000}, {"fold", 250}};
  device.queue_time_us = 500;
  Attend(sequence);
  device.stages = {{"append", 20}};
  Attend(sequence);
  std::map<std::string, double> stages;
  for (const auto& metric : Family("spillway_attend_stage_seconds").series) {
    ASSERT_EQ(metric.labels.at(0).first, "stage");
    stages[metric.labels.at(0).second] = metric.value;
    EXPECT_EQ(metric.cumulative_counts.back(), metric.value > 0 ? 1 : 0);
  }
  EXPECT_EQ(stages, (std::map<std::string, double>{{"append", 20 / 1e6},
                                                   {"dense", 0},
                                                   {"score", 3000 / 1e6},
                                                   {"cut", 0},
                                                   {"sample", 0},
                                                   {"fold", 250 / 1e6}}));
  const std::vector<MetricSeries> waits = Family("spillway_device_queue_seconds").series;
  ASSERT_EQ(waits.size(), 2);
  EXPECT_EQ(waits[0].labels.at(0).second, "toy:0");
  EXPECT_EQ(waits[0].labels.at(1).second, "step");
  EXPECT_EQ(waits[0].cumulative_counts.back(), 2);
  EXPECT_EQ(waits[0].value, 1000 / 1e6);
  EXPECT_EQ(waits[1].labels.at(1).second, "long");
  EXPECT_EQ(waits[1].cumulative_counts.back(), 2) << "an append of two layers";
}

TEST_F(MetricsTest, CallsAreToldByMethodAndStatus) {
  calls.Find("/spillway.v1.AttentionService/Attend")->Note(0, 0.003);
  calls.Find("/spillway.v1.AttentionService/Attend")->Note(0, 0.004);
  calls.Find("/spillway.v1.AttentionService/Attend")->Note(5, 0.001);
  EXPECT_EQ(calls.Find("/somebody.Else/Attend"), nullptr);
  std::map<std::string, double> counts;
  for (const auto& metric : Family("spillway_requests_total").series) {
    counts[absl::StrCat(metric.labels.at(0).second, " ", metric.labels.at(1).second)] =
        metric.value;
  }
  // A method that was never called has no series.
  EXPECT_THAT(counts, testing::ElementsAre(testing::Pair("AttentionService/Attend NOT_FOUND", 1),
                                           testing::Pair("AttentionService/Attend OK", 2)));
  const auto durations = Family("spillway_request_duration_seconds").series;
  ASSERT_EQ(durations.size(), 1);
  EXPECT_EQ(durations.at(0).cumulative_counts.back(), 3);
  EXPECT_NEAR(durations.at(0).value, 0.008, 1e-12);
}

TEST_F(MetricsTest, ModelsHaveSeriesUpToABound) {
  for (int i = 0; i < 40; ++i) {
    now += std::chrono::seconds(1);
    ASSERT_TRUE(engine->CreateModel(absl::StrCat("a", i), model->spec, model->policy).ok());
  }
  EXPECT_EQ(Value("spillway_models"), 41);
  const auto series = Family("spillway_model_tokens").series;
  ASSERT_EQ(series.size(), Metrics::kModelCountMax);
  // The oldest models have series, whatever their names.
  EXPECT_EQ(series.front().labels.at(0).second, "m");
  EXPECT_EQ(series.back().labels.at(0).second, "a14");
}

TEST_F(MetricsTest, ReadinessIsTold) {
  EXPECT_EQ(Value("spillway_ready"), 1);
  not_ready = "draining";
  EXPECT_EQ(Value("spillway_ready"), 0);
}

TEST_F(MetricsTest, AuditsAreToldByLayer) {
  model->audits.Record(1, 0, 0, 4, 0.1, 20, 3);
  const MetricFamily checks = Family("spillway_audit_checks_total");
  ASSERT_EQ(checks.series.size(), 1);
  EXPECT_EQ(checks.series.at(0).value, 20);
  EXPECT_EQ(checks.series.at(0).labels.at(0).second, "m");
  EXPECT_EQ(checks.series.at(0).labels.at(1).second, "1");
}

}  // namespace
}  // namespace spillway
