#pragma once

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

namespace spillway {

struct NumaNode {
  int core_count = 0;        // cores of the node that this process may use
  int64_t memory_bytes = 0;  // local memory
};

// The resources of the machine that this process may use.
struct Topology {
  int core_count = 0;                // physical cores in the process's CPU set
  int hardware_thread_count = 0;     // the same with SMT siblings
  std::vector<NumaNode> numa_nodes;  // by hwloc logical index
  int64_t memory_bytes = 0;          // of the machine
  // The tightest cgroup limit on this process; none if no limit is set.
  std::optional<int64_t> cgroup_memory_limit_bytes;
  // What the process's own limits (RLIMIT_AS, RLIMIT_DATA) left it when they were read; none if no
  // limit is set.
  std::optional<int64_t> process_memory_limit_bytes;
  // "always", "madvise" or "never"; "unsupported" without the kernel feature.
  std::string transparent_huge_pages;

  // The least of the machine's memory and the two limits.
  int64_t memory_limit_bytes() const;
};

// Reads the machine's properties from hwloc and /sys. INTERNAL if hwloc fails. Thread-safe.
absl::StatusOr<Topology> DetectTopology();

// Binds a page-aligned range to a NUMA node (hwloc logical index): pages that
// are touched from now on come from it. INVALID_ARGUMENT for an unknown node,
// FAILED_PRECONDITION when the system refuses. Thread-safe.
absl::Status BindMemory(std::span<std::byte> range, int numa_node);

// The tightest memory limit that cgroup v1 or v2 sets on the process whose
// /proc/self/cgroup is `membership`; `mount` is /sys/fs/cgroup. Limits of
// enclosing groups count. Nothing where no limit is set.
std::optional<int64_t> CgroupMemoryLimit(const std::filesystem::path& membership,
                                         const std::filesystem::path& mount);

}  // namespace spillway
