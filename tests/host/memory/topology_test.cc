#include "host/memory/topology.h"

#include <gtest/gtest.h>
#include <sched.h>
#include <sys/resource.h>

#include <cstdlib>
#include <fstream>
#include <string>

namespace spillway {
namespace {

namespace fs = std::filesystem;

TEST(Topology, AgreesWithTheSystem) {
  const absl::StatusOr<Topology> t = DetectTopology();
  ASSERT_TRUE(t.ok()) << t.status();
  cpu_set_t set;
  ASSERT_EQ(sched_getaffinity(0, sizeof(set), &set), 0);
  EXPECT_EQ(t->hardware_thread_count, CPU_COUNT(&set));
  EXPECT_GE(t->core_count, 1);
  EXPECT_LE(t->core_count, t->hardware_thread_count);
  ASSERT_FALSE(t->numa_nodes.empty());
  // The first line is like "MemTotal:  24684084 kB".
  std::ifstream meminfo("/proc/meminfo");
  std::string name;
  int64_t kib = 0;
  ASSERT_TRUE(meminfo >> name >> kib);
  EXPECT_EQ(t->memory_bytes, kib * 1024);
  EXPECT_LE(t->memory_limit_bytes(), t->memory_bytes);
  EXPECT_FALSE(t->transparent_huge_pages.empty());
}

TEST(Topology, TheCgroupLimitBindsWhereItIsLess) {
  Topology t;
  t.memory_bytes = 100;
  EXPECT_EQ(t.memory_limit_bytes(), 100);
  t.cgroup_memory_limit_bytes = 40;
  EXPECT_EQ(t.memory_limit_bytes(), 40);
  t.cgroup_memory_limit_bytes = 400;
  EXPECT_EQ(t.memory_limit_bytes(), 100);
}

TEST(Topology, TheLimitsOfTheProcessBindWhereTheyAreLess) {
  Topology t;
  t.memory_bytes = 100;
  t.cgroup_memory_limit_bytes = 40;
  t.process_memory_limit_bytes = 20;
  EXPECT_EQ(t.memory_limit_bytes(), 20);
  t.process_memory_limit_bytes = 50;
  EXPECT_EQ(t.memory_limit_bytes(), 40);
}

TEST(Topology, WhatTheLimitsOfTheProcessLeaveIt) {
  constexpr rlim_t kLimit = rlim_t{1} << 50;
  for (const auto resource : {RLIMIT_AS, RLIMIT_DATA}) {
    rlimit before = {};
    ASSERT_EQ(getrlimit(resource, &before), 0);
    const rlimit limited = {kLimit, before.rlim_max};
    ASSERT_EQ(setrlimit(resource, &limited), 0);
    const absl::StatusOr<Topology> t = DetectTopology();
    ASSERT_EQ(setrlimit(resource, &before), 0);
    ASSERT_TRUE(t.ok()) << t.status();
    ASSERT_TRUE(t->process_memory_limit_bytes.has_value());
    EXPECT_LT(*t->process_memory_limit_bytes, int64_t{1} << 50);
    EXPECT_GT(*t->process_memory_limit_bytes, int64_t{1} << 49);
  }
}

// A made-up /sys/fs/cgroup and /proc/self/cgroup.
class Cgroup : public ::testing::Test {
 protected:
  void SetUp() override {
    std::string name = (fs::temp_directory_path() / "spillway_cgroup_XXXXXX").string();
    ASSERT_NE(mkdtemp(name.data()), nullptr);
    root_ = name;
  }
  void TearDown() override { fs::remove_all(root_); }
  void Write(const std::string& path, const std::string& text) {
    fs::create_directories((root_ / path).parent_path());
    std::ofstream(root_ / path) << text << "\n";
  }
  std::optional<int64_t> Limit() { return CgroupMemoryLimit(root_ / "membership", root_ / "sys"); }

  fs::path root_;
};

TEST_F(Cgroup, Version2TakesTheTightestOfTheEnclosingGroups) {
  Write("membership", "0::/user/session");
  Write("sys/user/memory.max", "5000");
  Write("sys/user/session/memory.max", "max");
  EXPECT_EQ(Limit(), 5000);
  Write("sys/user/session/memory.max", "3000");
  EXPECT_EQ(Limit(), 3000);
  Write("sys/user/session/memory.max", "7000");
  EXPECT_EQ(Limit(), 5000);
}

TEST_F(Cgroup, Version1FindsItsController) {
  Write("membership", "7:cpu,memory:/box\n6:memoryless:/other\n0::/");
  Write("sys/memory/memory.limit_in_bytes", "9223372036854771712");
  EXPECT_EQ(Limit(), std::nullopt);
  Write("sys/memory/box/memory.limit_in_bytes", "4096");
  EXPECT_EQ(Limit(), 4096);
}

TEST_F(Cgroup, AContainerSeesItsOwnGroupAtTheRoot) {
  Write("membership", "4:memory:/docker/0123");
  Write("sys/memory/memory.limit_in_bytes", "8192");
  EXPECT_EQ(Limit(), 8192);
}

TEST_F(Cgroup, NoFilesMeanNoLimit) {
  EXPECT_EQ(Limit(), std::nullopt);
  Write("membership", "nonsense\n0::/gone");
  EXPECT_EQ(Limit(), std::nullopt);
}

TEST(BindMemory, RefusesAnUnknownNode) {
  alignas(4096) std::byte page[4096];
  EXPECT_EQ(BindMemory(page, 4096).code(), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(BindMemory(page, -1).code(), absl::StatusCode::kInvalidArgument);
}

}  // namespace
}  // namespace spillway
