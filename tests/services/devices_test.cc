#include "services/devices.h"

#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace spillway {
namespace {

using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

// The ordinals may have gaps: a GPU that CUDA cannot query is not listed.
const std::vector<GpuName> kGpus = {{0, "GPU-aa"}, {1, "GPU-bb"}, {3, "GPU-dd"}};

TEST(ChooseGpus, AutoTakesAll) {
  EXPECT_THAT(*ChooseGpus({"auto"}, kGpus), ElementsAre(0, 1, 3));
  EXPECT_THAT(*ChooseGpus({"auto"}, {}), IsEmpty());
}

TEST(ChooseGpus, NamesInTheirOrder) {
  EXPECT_THAT(*ChooseGpus({"cuda:1"}, kGpus), ElementsAre(1));
  EXPECT_THAT(*ChooseGpus({"GPU-dd", "cuda:0", "GPU-bb"}, kGpus), ElementsAre(3, 0, 1));
}

TEST(ChooseGpus, RefusesWhatIsNotThereAndSaysWhatIs) {
  const absl::Status status = ChooseGpus({"cuda:0", "cuda:2"}, kGpus).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kNotFound);
  EXPECT_THAT(std::string(status.message()),
              AllOf(HasSubstr("there is no device cuda:2"), HasSubstr("cuda:3 (GPU-dd)")));
  EXPECT_THAT(std::string(ChooseGpus({"GPU-cc"}, {}).status().message()), HasSubstr("no GPU"));
}

TEST(ChooseGpus, RefusesOneGpuUnderBothItsNames) {
  for (const auto& names : {std::vector<std::string>{"cuda:1", "GPU-bb"}, {"GPU-bb", "cuda:1"}}) {
    const absl::Status status = ChooseGpus(names, kGpus).status();
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
    EXPECT_THAT(std::string(status.message()),
                AllOf(HasSubstr(names[1] + " is named twice"), HasSubstr("cuda:1 (GPU-bb)")));
  }
}

}  // namespace
}  // namespace spillway
