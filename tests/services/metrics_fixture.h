#pragma once

#include <gtest/gtest.h>

#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "services/metrics/metrics.h"
#include "tests/engine/engine_fixture.h"

namespace spillway {

// The metrics of an engine over the toy device.
class MetricsTest : public EngineTest {
 protected:
  MetricsTest() {
    calls.Add("/spillway.v1.AttentionService/Attend");
    calls.Add("/spillway.v1.AdminService/GetStatistics");
  }

  MetricFamily Family(const std::string& name) const {
    for (MetricFamily& family : metrics.Collect()) {
      if (family.name == name) return family;
    }
    ADD_FAILURE() << "there is no " << name;
    return {};
  }
  // The value of the series without labels.
  double Value(const std::string& name) const {
    const MetricFamily family = Family(name);
    EXPECT_EQ(family.series.size(), 1);
    return family.series.at(0).value;
  }
  void Attend(const std::shared_ptr<Sequence>& sequence) { Attend(std::vector{sequence}); }
  // In one job.
  void Attend(const std::vector<std::shared_ptr<Sequence>>& sequences) {
    AttendRequest request;
    for (const auto& sequence : sequences) request.items.push_back(Item(sequence));
    std::optional<absl::StatusOr<AttendOutcome>> result;
    engine->Attend(std::move(request), Into(&result));
    device.ReleaseAll();
    ASSERT_TRUE(result->ok());
  }

  CallCounters calls;
  std::string not_ready;
  Metrics metrics{{.engine = &*engine,
                   .calls = &calls,
                   .server = [] { return ServerCounts{3, 2, 6, 1, 5, 4, 2.5}; },
                   .not_ready = [this] { return not_ready; },
                   .version = "1.2.3",
                   .boot_id = "b",
                   .start_time = absl::FromUnixSeconds(1000),
                   .started = SteadyNow(),
                   .losses = {}}};
};

}  // namespace spillway
