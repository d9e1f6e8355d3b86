#include "engine/reason.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "spillway/v1/reason.pb.h"

namespace spillway {
namespace {

TEST(Reason, IsThatOfTheApi) {
  std::vector<std::string> only_in_api;
  for (int value = v1::Reason_MIN; value <= v1::Reason_MAX; ++value) {
    const std::string name(NameOf(static_cast<Reason>(value)));
    if (name.empty()) {
      if (v1::Reason_IsValid(value)) only_in_api.push_back(v1::Reason_Name(v1::Reason(value)));
      continue;
    }
    EXPECT_EQ(absl::StrCat("REASON_", name), v1::Reason_Name(v1::Reason(value)));
  }
  // Given by clients of a cluster alone.
  EXPECT_THAT(only_in_api, testing::ElementsAre("REASON_UNSPECIFIED", "REASON_DAEMON_LOST"));
}

}  // namespace
}  // namespace spillway
