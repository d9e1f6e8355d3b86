#include "cli/findings.h"

#include <unistd.h>

#include <fstream>
#include <map>

#include "absl/strings/str_cat.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace spillway::cli {
namespace {

namespace fs = std::filesystem;
using testing::HasSubstr;

constexpr int64_t kGiB = int64_t{1} << 30;
constexpr ProcessLimits kPlenty = {.memlock_bytes = -1, .descriptor_count = 1 << 20};

// A fake machine: a folder with the files that Examine() reads.
class FindingsTest : public testing::Test {
 protected:
  FindingsTest() : root_(fs::path(testing::TempDir()) / absl::StrCat("findings-", getpid())) {
    fs::remove_all(root_);
    Write("sys/kernel/mm/transparent_hugepage/enabled", "always [madvise] never\n");
    Write("proc/meminfo", "MemTotal:       33554432 kB\nMemAvailable:   30000000 kB\n");
    Write("sys/devices/system/node/node0/cpulist", "0-3");
  }
  ~FindingsTest() override { fs::remove_all(root_); }

  void Write(const std::string& path, const std::string& text) {
    fs::create_directories((root_ / path).parent_path());
    std::ofstream(root_ / path) << text;
  }
  void AddGpu(const std::string& width) {
    Write("proc/driver/nvidia/version", "NVRM version: 550.54\nGCC version: 12\n");
    Write("proc/driver/nvidia/gpus/0000:01:00.0/information", "Model: A GPU\n");
    Write("sys/bus/pci/devices/0000:01:00.0/current_link_width", width + "\n");
    Write("sys/bus/pci/devices/0000:01:00.0/max_link_width", "16\n");
    Write("sys/bus/pci/devices/0000:01:00.0/current_link_speed", "16.0 GT/s PCIe\n");
    Write("tmp/nvidia-mps/control", "");
  }
  std::map<std::string, Finding> Look(const ProcessLimits& limits = kPlenty,
                                      std::optional<int64_t> limit_bytes = {}) const {
    std::map<std::string, Finding> findings;
    for (Finding& finding : Examine(root_, limits, limit_bytes)) {
      EXPECT_EQ(finding.ok, finding.advice.empty()) << finding.what;
      findings[finding.what] = finding;
    }
    return findings;
  }

  const fs::path root_;
};

TEST_F(FindingsTest, AGoodMachineHasNoWarnings) {
  AddGpu("16");
  for (const auto& [what, finding] : Look()) EXPECT_TRUE(finding.ok) << what;
  EXPECT_EQ(Look()["driver"].found, "NVRM version: 550.54");
  EXPECT_THAT(Look()["GPU 0000:01:00.0"].found, HasSubstr("PCIe x16 of x16, 16.0 GT/s PCIe"));
  EXPECT_EQ(Look()["NUMA"].found, "one node");
}

TEST_F(FindingsTest, WithoutHugePagesRowsLieInSmallOnes) {
  Write("sys/kernel/mm/transparent_hugepage/enabled", "always madvise [never]\n");
  EXPECT_FALSE(Look()["huge pages"].ok);
  EXPECT_EQ(Look()["huge pages"].found, "never");
  fs::remove_all(root_ / "sys/kernel");
  EXPECT_FALSE(Look()["huge pages"].ok);
}

TEST_F(FindingsTest, ANarrowLinkIsTold) {
  AddGpu("4");
  EXPECT_FALSE(Look()["GPU 0000:01:00.0"].ok);
  EXPECT_THAT(Look()["GPU 0000:01:00.0"].found, HasSubstr("x4 of x16"));
}

TEST_F(FindingsTest, MpsAndLockedMemoryMatterWithAGpuAlone) {
  const ProcessLimits little = {.memlock_bytes = 65536, .descriptor_count = 1 << 20};
  EXPECT_TRUE(Look(little)["locked memory"].ok);
  EXPECT_EQ(Look().count("MPS"), 0);
  AddGpu("16");
  EXPECT_FALSE(Look(little)["locked memory"].ok);
  EXPECT_TRUE(Look()["MPS"].ok);
  fs::remove_all(root_ / "tmp");
  EXPECT_FALSE(Look()["MPS"].ok);
}

TEST_F(FindingsTest, FewDescriptorsAreTold) {
  EXPECT_FALSE(Look({.memlock_bytes = -1, .descriptor_count = 1024})["open files"].ok);
}

TEST_F(FindingsTest, MemoryThatOthersHoldIsTold) {
  // The limit is three quarters of 32 GiB; 28.6 GiB are free.
  EXPECT_TRUE(Look()["memory"].ok);
  EXPECT_EQ(Look()["memory"].found, "28.6 GiB free, limit 24.0 GiB by default");
  Write("proc/meminfo", "MemTotal:       33554432 kB\nMemAvailable:   20971520 kB\n");
  EXPECT_FALSE(Look()["memory"].ok);
  EXPECT_THAT(Look()["memory"].advice, HasSubstr("--memory-limit 18432MiB"));
  // A running daemon already holds a part of its limit.
  EXPECT_TRUE(Look(kPlenty, 24 * kGiB)["memory"].ok);
}

TEST_F(FindingsTest, NodesAreCounted) {
  Write("sys/devices/system/node/node1/cpulist", "4-7");
  Write("sys/devices/system/node/online", "0-1");
  EXPECT_THAT(Look()["NUMA"].found, HasSubstr("2 nodes"));
}

}  // namespace
}  // namespace spillway::cli
