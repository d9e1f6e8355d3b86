// A job reports how long each of its stages took.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <memory>
#include <string>
#include <vector>

#include "host/policy/policy.h"
#include "tests/conformance/device_bench.h"
#include "tests/reference/trace.h"

namespace spillway {
namespace {

using ::testing::ElementsAre;
using ::testing::IsSupersetOf;

class JobStages : public ::testing::TestWithParam<DeviceFactory> {
 protected:
  static constexpr int64_t kTokens = 20000;

  JobStages()
      : spec_(MakeSpec(2, 2, 64, DType::kBF16)),
        bench_(GetParam(), spec_),
        sequence_(bench_),
        context_(reference::TraceContext(spec_, kTokens + 16, 5)),
        q_(reference::TraceQueries(context_, 1, 6, 1.5)) {
    EXPECT_TRUE(sequence_.Append(context_, 0, kTokens).ok());
  }

  // Runs a job with these items; each of its stages must have taken time. Returns their names.
  std::vector<std::string> Run(std::vector<JobItem> items) {
    auto job = std::make_unique<Job>();
    job->items = std::move(items);
    const std::unique_ptr<Job> done = bench_.Run(std::move(job));
    for (const JobItem& item : done->items) EXPECT_TRUE(item.status.ok()) << item.status;
    std::vector<std::string> names;
    double sum = 0;
    for (const StageTime& stage : done->stages) {
      EXPECT_GT(stage.us, 0) << stage.name;
      EXPECT_EQ(stage.device, "");
      names.push_back(stage.name);
      sum += stage.us;
    }
    // On a GPU, the two times differ by the resolution of its clocks.
    EXPECT_LT(sum, done->device_time_us + 10);
    return names;
  }

  Policy Default(Selector selector = Selector::kAsymmetric) const {
    Policy policy = DefaultPolicy(spec_);
    policy.selector = selector;
    return policy;
  }

  const ModelSpec spec_;
  DeviceBench bench_;
  BenchSequence sequence_;
  const reference::Context context_;
  const std::vector<float> q_;
};

TEST_P(JobStages, OfASparseAttend) {
  // A GPU replays a graph from the third attend on.
  for (int i = 0; i < 4; ++i) {
    EXPECT_THAT(Run({sequence_.AttendItem(Default(), q_, false)}),
                ElementsAre("score", "cut", "sample", "fold"));
  }
}

TEST_P(JobStages, OfEveryWayToAttend) {
  Policy policy = Default();
  policy.tail = Tail::kNone;
  // A GPU lists the heavy rows with the kernels of the stage "sample".
  EXPECT_THAT(Run({sequence_.AttendItem(policy, q_, false)}),
              IsSupersetOf({"score", "cut", "fold"}));
  policy = Default(Selector::kOracle);
  policy.heavy_kind = HeavyKind::kMass;
  EXPECT_THAT(Run({sequence_.AttendItem(policy, q_, false)}),
              ElementsAre("score", "cut", "sample", "fold"));
}

TEST_P(JobStages, OfAnAttendToAllRows) {
  EXPECT_THAT(Run({sequence_.AttendItem(Default(Selector::kAll), q_, false)}),
              ElementsAre("dense"));
  EXPECT_THAT(Run({sequence_.AttendItem(Default(Selector::kAll), q_, false),
                   sequence_.AttendItem(Default(), q_, false)}),
              ElementsAre("dense", "score", "cut", "sample", "fold"));
}

TEST_P(JobStages, OfAStepThatAppends) {
  for (int i = 0; i < 4; ++i) {
    EXPECT_THAT(Run({sequence_.StepItem(context_, Default(), q_)}),
                ElementsAre("append", "score", "cut", "sample", "fold"));
  }
  EXPECT_THAT(Run({sequence_.StepItem(context_, Default(Selector::kAll), q_)}),
              ElementsAre("append", "dense"));
}

INSTANTIATE_TEST_SUITE_P(Devices, JobStages, ::testing::ValuesIn(DeviceFactories()),
                         [](const auto& factory) { return factory.param.name; });

}  // namespace
}  // namespace spillway
