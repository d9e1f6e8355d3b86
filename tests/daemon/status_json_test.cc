#include "daemon/http/status_json.h"

#include <gtest/gtest.h>

#include "nlohmann/json.hpp"
#include "tests/services/metrics_fixture.h"

namespace spillway {
namespace {

using nlohmann::json;
using StatusJsonTest = MetricsTest;

TEST_F(StatusJsonTest, SaysWhyTheDaemonIsNotReady) {
  EXPECT_EQ(json::parse(StatusJson(metrics)).at("not_ready"), "");
  not_ready = "draining";
  EXPECT_EQ(json::parse(StatusJson(metrics)).at("not_ready"), "draining");
}

TEST_F(StatusJsonTest, HasAuditsByLayerAndHead) {
  model->audits.Record(1, 0, 0, 4, 0.1, 20, 3);
  const json status = json::parse(StatusJson(metrics));
  const json& audit = status.at("models").at(0).at("audit");
  EXPECT_EQ(audit.at("layers"), json::parse(R"([{"layer":1,"checks":20,"violations":3}])"));
  EXPECT_EQ(audit.at("heads").at(0).at("violations"), 3);
}

}  // namespace
}  // namespace spillway
