#include "services/config/config.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstdlib>
#include <optional>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "daemon/config/command_line.h"
#include "daemon/config/config_file.h"

namespace spillway {
namespace {

using ::testing::HasSubstr;
using ::testing::Not;

constexpr int64_t kGiB = int64_t{1} << 30;

absl::StatusOr<CommandLine> Parse(const Topology& topology, std::vector<const char*> arguments) {
  arguments.insert(arguments.begin(), "spillwayd");
  return ParseCommandLine(static_cast<int>(arguments.size()), arguments.data(), topology, "1.2.3");
}

Topology Machine(int64_t memory_bytes, std::optional<int64_t> cgroup_limit_bytes = std::nullopt) {
  Topology topology;
  topology.memory_bytes = memory_bytes;
  topology.cgroup_memory_limit_bytes = cgroup_limit_bytes;
  return topology;
}

TEST(Config, WhatToDoWhereAGpuIsLostIsOneOfThree) {
  const Topology machine = Machine(24 * kGiB);
  EXPECT_EQ(Parse(machine, {})->config.when_lost, WhenLost::kRestart);
  EXPECT_EQ(Parse(machine, {"--when-lost", "stay"})->config.when_lost, WhenLost::kStay);
  EXPECT_EQ(Parse(machine, {"--when-lost", "cpu"})->config.when_lost, WhenLost::kCpu);
  EXPECT_THAT(ToToml(Parse(machine, {"--when-lost", "cpu"})->config),
              HasSubstr("when_lost = \"cpu\"\n"));
  EXPECT_THAT(std::string(Parse(machine, {"--when-lost", "weep"}).status().message()),
              HasSubstr("--when-lost: \"weep\" is not one of stay, restart, cpu"));
  EXPECT_THAT(
      std::string(EmbeddedConfig({{"device.when_lost", "cpu"}}, machine).status().message()),
      HasSubstr("device.when_lost: an embedded engine cannot restart its process"));
}

TEST(Config, CopiesOfRowsAreLeftToTheEngineASizeOrNone) {
  const Topology machine = Machine(24 * kGiB);
  const auto limit = [&](std::vector<const char*> arguments) {
    return Parse(machine, std::move(arguments))->config.gpu_resident_limit_bytes;
  };
  EXPECT_EQ(limit({}), std::nullopt);
  EXPECT_EQ(limit({"--gpu-resident-limit", "auto"}), std::nullopt);
  EXPECT_EQ(limit({"--gpu-resident-limit", "0"}), 0);
  EXPECT_EQ(limit({"--gpu-resident-limit", "2GiB"}), 2 * kGiB);
  EXPECT_THAT(ToToml(Parse(machine, {})->config), HasSubstr("gpu_resident_limit = \"auto\"\n"));
  EXPECT_THAT(std::string(Parse(machine, {"--gpu-resident-limit", "all"}).status().message()),
              HasSubstr("--gpu-resident-limit: \"all\" is not"));
}

TEST(Config, TheMemoryLimitIsThreeQuartersOfWhatThereIs) {
  EXPECT_EQ(Parse(Machine(24 * kGiB), {})->config.memory_limit_bytes, 18 * kGiB);
  EXPECT_EQ(Parse(Machine(24 * kGiB, 8 * kGiB), {})->config.memory_limit_bytes, 6 * kGiB);
}

TEST(Config, TheMemoryLimitIsWithinThoseOfTheProcess) {
  Topology machine = Machine(24 * kGiB, 8 * kGiB);
  machine.process_memory_limit_bytes = 4 * kGiB;
  EXPECT_EQ(Parse(machine, {})->config.memory_limit_bytes, 3 * kGiB);
  EXPECT_TRUE(Parse(machine, {"--memory-limit", "4GiB"}).ok());
  const auto message = [&machine](const char* limit) {
    return std::string(Parse(machine, {"--memory-limit", limit}).status().message());
  };
  EXPECT_EQ(message("5GiB"),
            "--memory-limit: \"5GiB\" is more memory than is available: the machine has 24.0 GiB, "
            "the limits of the process (ulimit -v, ulimit -d) leave it 4.0 GiB");
  EXPECT_EQ(
      message("9GiB"),
      "--memory-limit: \"9GiB\" is more memory than is available: the machine has 24.0 GiB, "
      "the control group's limit is 8.0 GiB, the limits of the process (ulimit -v, ulimit -d) "
      "leave it 4.0 GiB");
}

TEST(Config, AMemoryLimitAboveTheMachinesMemoryIsRefused) {
  const auto line = Parse(Machine(24 * kGiB), {"--memory-limit", "900GiB"});
  ASSERT_TRUE(absl::IsInvalidArgument(line.status()));
  const std::string message(line.status().message());
  EXPECT_THAT(message, HasSubstr("--memory-limit"));
  EXPECT_THAT(message, HasSubstr("\"900GiB\""));
  EXPECT_THAT(message, HasSubstr("the machine has 24.0 GiB"));
  EXPECT_THAT(message, Not(HasSubstr("control group")));
  EXPECT_TRUE(Parse(Machine(24 * kGiB), {"--memory-limit", "24GiB"}).ok());
}

TEST(Config, AMemoryLimitAboveTheControlGroupsIsRefused) {
  const auto line = Parse(Machine(24 * kGiB, 8 * kGiB), {"--memory-limit", "9GiB"});
  ASSERT_TRUE(absl::IsInvalidArgument(line.status()));
  EXPECT_THAT(std::string(line.status().message()),
              HasSubstr("the machine has 24.0 GiB, the control group's limit is 8.0 GiB"));
  EXPECT_TRUE(Parse(Machine(24 * kGiB, 8 * kGiB), {"--memory-limit", "8GiB"}).ok());
}

TEST(Config, TheSeedOfTheSamplingIsRandomUnlessItIsGiven) {
  const Topology machine = Machine(24 * kGiB);
  EXPECT_EQ(Parse(machine, {})->config.sampling_seed, -1);
  EXPECT_EQ(Parse(machine, {"--sampling-seed", "0"})->config.sampling_seed, 0);
  EXPECT_EQ(Parse(machine, {"--sampling-seed", "9223372036854775807"})->config.sampling_seed,
            9223372036854775807);
  for (const char* bad : {"-2", "9223372036854775808", "1.5", "random"}) {
    const auto line = Parse(machine, {"--sampling-seed", bad});
    EXPECT_TRUE(absl::IsInvalidArgument(line.status())) << bad;
    EXPECT_THAT(std::string(line.status().message()), HasSubstr("--sampling-seed")) << bad;
  }
}

TEST(Config, TheGraceOfUnnamedSequencesIsASpanOfTime) {
  const Topology machine = Machine(24 * kGiB);
  EXPECT_EQ(Parse(machine, {})->config.unnamed_grace_seconds, 60);
  EXPECT_EQ(Parse(machine, {"--unnamed-grace", "0"})->config.unnamed_grace_seconds, 0);
  EXPECT_EQ(Parse(machine, {"--unnamed-grace", "2.5"})->config.unnamed_grace_seconds, 2.5);
  for (const char* bad : {"-1", "nan", "inf", "1e9", "soon"}) {
    const auto line = Parse(machine, {"--unnamed-grace", bad});
    EXPECT_TRUE(absl::IsInvalidArgument(line.status())) << bad;
    EXPECT_THAT(std::string(line.status().message()), HasSubstr("--unnamed-grace")) << bad;
  }
}

TEST(Config, MpsIsOffAutoOrOn) {
  const Topology machine = Machine(24 * kGiB);
  EXPECT_EQ(Parse(machine, {})->config.mps, MpsMode::kAuto);
  EXPECT_EQ(Parse(machine, {"--mps", "off"})->config.mps, MpsMode::kOff);
  EXPECT_EQ(Parse(machine, {"--mps", "on"})->config.mps, MpsMode::kOn);
  EXPECT_THAT(ToToml(Parse(machine, {"--mps", "on"})->config), HasSubstr("mps = \"on\"\n"));
  EXPECT_EQ(ModeName(MpsMode::kOff), "off");
  const auto line = Parse(machine, {"--mps", "sometimes"});
  ASSERT_TRUE(absl::IsInvalidArgument(line.status()));
  EXPECT_THAT(std::string(line.status().message()),
              HasSubstr("--mps: \"sometimes\" is not one of off, auto, on"));
}

TEST(Config, MpsIsForGpus) {
  const Topology machine = Machine(24 * kGiB);
  const auto line = Parse(machine, {"--mps", "on", "--device", "cpu"});
  ASSERT_TRUE(absl::IsInvalidArgument(line.status()));
  EXPECT_THAT(std::string(line.status().message()),
              HasSubstr("--mps (device.mps) is on and --device (device.name) is cpu"));
  for (const char* mode : {"off", "auto"}) {
    EXPECT_TRUE(Parse(machine, {"--mps", mode, "--device", "cpu"}).ok());
  }
  EXPECT_TRUE(Parse(machine, {"--mps", "on", "--device", "cuda:0"}).ok());
}

TEST(Config, AnEmbeddedEngineHasItsProcessesCuda) {
  const absl::Status status = EmbeddedConfig({{"device.mps", "on"}}, Machine(24 * kGiB)).status();
  ASSERT_TRUE(absl::IsInvalidArgument(status));
  EXPECT_THAT(std::string(status.message()),
              HasSubstr("device.mps: an embedded engine uses CUDA as its process"));
}

// Sets an environment variable for its lifetime, or removes it if `value` is null.
class Environment {
 public:
  Environment(const char* name, const char* value) : name_(name) {
    const char* before = std::getenv(name);
    if (before != nullptr) before_ = before;
    value == nullptr ? unsetenv(name) : setenv(name, value, 1);
  }
  ~Environment() { before_ ? setenv(name_, before_->c_str(), 1) : unsetenv(name_); }

 private:
  const char* const name_;
  std::optional<std::string> before_;
};

TEST(Config, SnapshotsLieInTheUsersStateFolder) {
  const Topology machine = Machine(24 * kGiB);
  const Environment service("STATE_DIRECTORY", nullptr);
  const Environment state("XDG_STATE_HOME", "relative");
  const Environment home("HOME", "/home/her");
  EXPECT_EQ(Parse(machine, {})->config.snapshot_folder,
            "/home/her/.local/state/spillway/snapshots");
  {
    const Environment named("XDG_STATE_HOME", "/state");
    EXPECT_EQ(DefaultSnapshotFolder(), "/state/spillway/snapshots");
    const Environment by_systemd("STATE_DIRECTORY", "/var/lib/spillway:/var/lib/more");
    EXPECT_EQ(DefaultSnapshotFolder(), "/var/lib/spillway/snapshots");
  }
  const Environment none("HOME", nullptr);
  EXPECT_EQ(Parse(machine, {})->config.snapshot_folder, "");
}

TEST(Config, SnapshotFoldersAreAbsoluteOrNone) {
  const Topology machine = Machine(24 * kGiB);
  const auto line = Parse(machine, {"--snapshot-folder", "/big/disk"});
  EXPECT_EQ(line->config.snapshot_folder, "/big/disk");
  EXPECT_THAT(ToToml(line->config), HasSubstr("[snapshots]\nfolder = \"/big/disk\"\n"));
  EXPECT_EQ(Parse(machine, {"--snapshot-folder", ""})->config.snapshot_folder, "");
  const absl::Status status = Parse(machine, {"--snapshot-folder", "chats"}).status();
  EXPECT_THAT(std::string(status.message()),
              HasSubstr("--snapshot-folder: \"chats\" is not an absolute path or empty"));
  // With an embedded engine, the program may choose any folder by default.
  EXPECT_EQ(EmbeddedConfig({}, machine)->snapshot_folder, "/");
  EXPECT_EQ(EmbeddedConfig({{"snapshots.folder", "/mine"}}, machine)->snapshot_folder, "/mine");
}

TEST(Config, SaysWhatDiffersAndWhatOfItMayChangeWhileTheDaemonServes) {
  const Topology machine = Machine(24 * kGiB);
  const Config before = Parse(machine, {"--ttl", "10", "--threads", "2"})->config;
  const Config after =
      Parse(machine, {"--ttl", "20", "--threads", "3", "--log-level", "debug"})->config;
  std::vector<std::string> said;
  for (const SettingChange& change : ChangesBetween(before, after)) {
    said.push_back(absl::StrCat(change.key, " ", change.before, " ", change.after, " ",
                                change.live ? "now" : "later"));
  }
  EXPECT_THAT(
      said, ::testing::ElementsAre("device.thread_count 2 3 later",
                                   "sequences.ttl_seconds 10 20 now", "log.level info debug now"));
  Config running = before;
  TakeLiveSettings(after, running);
  EXPECT_EQ(running.ttl_seconds, 20);
  EXPECT_EQ(running.log_level, "debug");
  EXPECT_EQ(running.thread_count, 2);
  EXPECT_TRUE(ChangesBetween(running, running).empty());
}

}  // namespace
}  // namespace spillway
