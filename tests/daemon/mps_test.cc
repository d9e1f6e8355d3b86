#include "daemon/server/mps.h"

#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace spillway {
namespace {

using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::Not;

// Answers as the test sets it, and records what it is asked to do.
class ScriptedSystem final : public MpsSystem {
 public:
  std::string Directory() const override { return "/run/mps"; }
  bool HasPipe() const override { return has_pipe; }
  int64_t User() const override { return 1000; }
  MpsControl Ask() override {
    done.push_back("ask");
    return control;
  }
  absl::Status Start() override {
    done.push_back("start");
    return start;
  }
  void Quit() override { done.push_back("quit"); }
  void KeepAway() override { done.push_back("keep away"); }

  bool has_pipe = false;
  MpsControl control;
  absl::Status start;
  std::vector<std::string> done;
};

Config With(MpsMode mode, std::vector<std::string> devices = {"auto"}) {
  Config config;
  config.mps = mode;
  config.devices = std::move(devices);
  return config;
}

DeviceInfo Gpu(const std::string& name, std::optional<bool> mps) {
  DeviceInfo info;
  info.name = name;
  info.uuid = "GPU-" + name;
  info.mps = mps;
  return info;
}

DeviceInfo Cpu() {
  DeviceInfo info;
  info.name = "cpu:0";
  return info;
}

std::string MessageOf(const absl::Status& status) { return std::string(status.message()); }

TEST(MpsTest, OffKeepsAwayAndAsksNothing) {
  ScriptedSystem system;
  system.control.answer = MpsAnswer::kAnswers;
  {
    const auto mps = Mps::Prepare(With(MpsMode::kOff), &system);
    ASSERT_TRUE(mps.ok());
    const auto report = mps->Check({Gpu("cuda:0", false)});
    ASSERT_TRUE(report.ok());
    EXPECT_FALSE((*report)->attached);
    EXPECT_FALSE((*report)->warning);
    EXPECT_EQ((*report)->reason, "cuda:0: --mps off");
  }
  EXPECT_THAT(system.done, ElementsAre("keep away"));
}

TEST(MpsTest, OffIsRefusedWhereCudaAttachedAllTheSame) {
  ScriptedSystem system;
  const auto mps = Mps::Prepare(With(MpsMode::kOff), &system);
  ASSERT_TRUE(mps.ok());
  const absl::Status status = mps->Check({Gpu("cuda:0", false), Gpu("cuda:1", true)}).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_THAT(MessageOf(status), AllOf(HasSubstr("--mps off: CUDA shares cuda:1 through MPS"),
                                       Not(HasSubstr("cuda:0"))));
}

TEST(MpsTest, TheCpuAloneNeedsNothing) {
  for (const MpsMode mode : {MpsMode::kOff, MpsMode::kAuto}) {
    ScriptedSystem system;
    const auto mps = Mps::Prepare(With(mode, {"cpu"}), &system);
    ASSERT_TRUE(mps.ok());
    const auto report = mps->Check({Cpu()});
    ASSERT_TRUE(report.ok());
    EXPECT_FALSE(report->has_value());
    EXPECT_THAT(system.done, IsEmpty());
  }
}

TEST(MpsTest, OnIsRefusedForTheCpuAlone) {
  ScriptedSystem system;
  const absl::Status status = Mps::Prepare(With(MpsMode::kOn, {"cpu"}), &system).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_THAT(MessageOf(status), HasSubstr("device cpu is not a GPU"));
  EXPECT_THAT(system.done, IsEmpty());
}

TEST(MpsTest, AutoAttachesWhereAControlDaemonAnswersAndLeavesItAlone) {
  ScriptedSystem system;
  system.control = {MpsAnswer::kAnswers, "", {1000}};
  {
    const auto mps = Mps::Prepare(With(MpsMode::kAuto), &system);
    ASSERT_TRUE(mps.ok());
    EXPECT_FALSE(mps->started());
    const auto report = mps->Check({Gpu("cuda:0", true)});
    ASSERT_TRUE(report.ok());
    EXPECT_TRUE((*report)->attached);
    EXPECT_FALSE((*report)->warning);
    EXPECT_EQ((*report)->reason, "a control daemon answers at /run/mps");
    EXPECT_THAT((*report)->advice, HasSubstr("CUDA_MPS_PIPE_DIRECTORY=/run/mps, as the same user"));
  }
  EXPECT_THAT(system.done, ElementsAre("ask"));
}

TEST(MpsTest, AutoStartsNone) {
  for (const MpsAnswer answer : {MpsAnswer::kAbsent, MpsAnswer::kNoProgram}) {
    ScriptedSystem system;
    system.control.answer = answer;
    {
      const auto mps = Mps::Prepare(With(MpsMode::kAuto), &system);
      ASSERT_TRUE(mps.ok());
      const auto report = mps->Check({Gpu("cuda:0", false)});
      ASSERT_TRUE(report.ok());
      EXPECT_FALSE((*report)->attached);
      EXPECT_FALSE((*report)->warning);
      EXPECT_EQ((*report)->reason, "cuda:0: no control daemon answers at /run/mps");
      EXPECT_THAT((*report)->advice, HasSubstr("--mps on"));
    }
    EXPECT_THAT(system.done, ElementsAre("ask"));
  }
}

TEST(MpsTest, AutoWithoutAGpuSaysNothing) {
  ScriptedSystem system;
  const auto mps = Mps::Prepare(With(MpsMode::kAuto), &system);
  ASSERT_TRUE(mps.ok());
  const auto report = mps->Check({Cpu()});
  ASSERT_TRUE(report.ok());
  EXPECT_FALSE(report->has_value());
}

TEST(MpsTest, AutoWarnsWhereCudaDidNotAttach) {
  ScriptedSystem system;
  system.control.answer = MpsAnswer::kAnswers;
  const auto mps = Mps::Prepare(With(MpsMode::kAuto), &system);
  ASSERT_TRUE(mps.ok());
  const auto report = mps->Check({Gpu("cuda:0", true), Gpu("cuda:1", false)});
  ASSERT_TRUE(report.ok());
  EXPECT_FALSE((*report)->attached);
  EXPECT_TRUE((*report)->warning);
  EXPECT_EQ((*report)->reason, "cuda:1: a control daemon answers at /run/mps");
}

// CUDA would wait for such a control daemon forever.
TEST(MpsTest, ASilentControlDaemonIsAvoidedOrRefused) {
  ScriptedSystem system;
  system.control.answer = MpsAnswer::kSilent;
  const auto mps = Mps::Prepare(With(MpsMode::kAuto), &system);
  ASSERT_TRUE(mps.ok());
  EXPECT_THAT(system.done, ElementsAre("ask", "keep away"));
  const auto report = mps->Check({Gpu("cuda:0", false)});
  ASSERT_TRUE(report.ok());
  EXPECT_TRUE((*report)->warning);
  EXPECT_THAT((*report)->reason, HasSubstr("the control daemon at /run/mps does not answer"));

  const absl::Status status = Mps::Prepare(With(MpsMode::kOn), &system).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_THAT(MessageOf(status),
              HasSubstr("--mps on: the control daemon at /run/mps does not answer"));
  EXPECT_THAT(system.done, ElementsAre("ask", "keep away", "ask"));
}

TEST(MpsTest, AnotherUsersServerIsAvoidedOrRefused) {
  ScriptedSystem system;
  system.control = {MpsAnswer::kAnswers, "", {1001}};
  ASSERT_TRUE(Mps::Prepare(With(MpsMode::kAuto), &system).ok());
  EXPECT_THAT(system.done, ElementsAre("ask", "keep away"));
  const absl::Status status = Mps::Prepare(With(MpsMode::kOn), &system).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_THAT(MessageOf(status),
              HasSubstr("serves user 1001, but this process belongs to user 1000"));
}

TEST(MpsTest, AServerOfThisUserOrOfRootIsUsed) {
  for (const std::vector<int64_t>& users : {std::vector<int64_t>{1001, 1000}, {0}, {}}) {
    ScriptedSystem system;
    system.control = {MpsAnswer::kAnswers, "", users};
    ASSERT_TRUE(Mps::Prepare(With(MpsMode::kOn), &system).ok());
    EXPECT_THAT(system.done, ElementsAre("ask"));
  }
}

TEST(MpsTest, OnStartsOneWhereNoneRunsAndEndsIt) {
  ScriptedSystem system;
  {
    absl::StatusOr<Mps> mps = Mps::Prepare(With(MpsMode::kOn, {"cuda:0"}), &system);
    ASSERT_TRUE(mps.ok());
    // The control daemon is ended once, however often the object is moved.
    const Mps moved = *std::move(mps);
    EXPECT_TRUE(moved.started());
    const auto report = moved.Check({Gpu("cuda:0", true)});
    ASSERT_TRUE(report.ok());
    EXPECT_TRUE((*report)->attached);
    EXPECT_EQ((*report)->reason, "started a control daemon at /run/mps");
    EXPECT_THAT(system.done, ElementsAre("ask", "start"));
  }
  EXPECT_THAT(system.done, ElementsAre("ask", "start", "quit"));
}

TEST(MpsTest, OnLeavesOneAloneThatSomebodyElseStarted) {
  ScriptedSystem running;
  running.control.answer = MpsAnswer::kAnswers;
  ASSERT_TRUE(Mps::Prepare(With(MpsMode::kOn), &running).ok());
  EXPECT_THAT(running.done, ElementsAre("ask"));

  ScriptedSystem faster;
  faster.start = absl::AlreadyExistsError("it runs already");
  ASSERT_TRUE(Mps::Prepare(With(MpsMode::kOn), &faster).ok());
  EXPECT_THAT(faster.done, ElementsAre("ask", "start"));
}

TEST(MpsTest, OnIsRefusedWhereNoneCanBeStarted) {
  ScriptedSystem without;
  without.control = {MpsAnswer::kNoProgram, "nvidia-cuda-mps-control is not in PATH", {}};
  absl::Status status = Mps::Prepare(With(MpsMode::kOn), &without).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_THAT(MessageOf(status), HasSubstr("--mps on: no control daemon runs at /run/mps, and none "
                                           "can be started: nvidia-cuda-mps-control is not in"));
  EXPECT_THAT(without.done, ElementsAre("ask"));

  ScriptedSystem failing;
  failing.start = absl::FailedPreconditionError("exit status 1: no log directory");
  status = Mps::Prepare(With(MpsMode::kOn), &failing).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_THAT(MessageOf(status), HasSubstr("exit status 1: no log directory"));
  EXPECT_THAT(failing.done, ElementsAre("ask", "start"));
}

TEST(MpsTest, OnTakesAPipeWithoutTheProgram) {
  ScriptedSystem system;
  system.control.answer = MpsAnswer::kNoProgram;
  system.has_pipe = true;
  const auto mps = Mps::Prepare(With(MpsMode::kOn), &system);
  ASSERT_TRUE(mps.ok());
  EXPECT_TRUE((*mps->Check({Gpu("cuda:0", true)}))->attached);
  EXPECT_FALSE(mps->Check({Gpu("cuda:0", false)}).ok());
}

TEST(MpsTest, OnIsRefusedWhereCudaDidNotAttachAndEndsWhatItStarted) {
  ScriptedSystem system;
  {
    const auto mps = Mps::Prepare(With(MpsMode::kOn), &system);
    ASSERT_TRUE(mps.ok());
    absl::Status status = mps->Check({Gpu("cuda:0", true), Gpu("cuda:1", false)}).status();
    EXPECT_EQ(status.code(), absl::StatusCode::kFailedPrecondition);
    EXPECT_THAT(MessageOf(status),
                AllOf(HasSubstr("--mps on: CUDA does not share cuda:1 through MPS: started a "
                                "control daemon at /run/mps;"),
                      HasSubstr("CUDA_MPS_LOG_DIRECTORY"), Not(HasSubstr("does not say"))));
    status = mps->Check({Gpu("cuda:0", std::nullopt)}).status();
    EXPECT_THAT(MessageOf(status), HasSubstr("this driver does not say whether CUDA is attached"));
    status = mps->Check({Cpu()}).status();
    EXPECT_EQ(status.code(), absl::StatusCode::kFailedPrecondition);
    EXPECT_THAT(MessageOf(status), HasSubstr("--mps on: there is no GPU that can be used"));
  }
  EXPECT_THAT(system.done, ElementsAre("ask", "start", "quit"));
}

}  // namespace
}  // namespace spillway
