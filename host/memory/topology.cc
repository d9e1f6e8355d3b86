#include "host/memory/topology.h"

#include <hwloc.h>
#include <sys/resource.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <fstream>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"

namespace spillway {
namespace {

namespace fs = std::filesystem;

// The machine's topology from hwloc. Loaded once, because it does not change and loading takes tens
// of milliseconds. Never freed, so that destructors of other static objects can use it.
class Machine {
 public:
  static absl::StatusOr<hwloc_topology_t> Get() {
    static const Machine* const machine = new Machine;
    if (machine->topology_ == nullptr) {
      return absl::InternalError("hwloc cannot read the machine's topology");
    }
    return machine->topology_;
  }

 private:
  Machine() {
    if (hwloc_topology_init(&topology_) != 0) {
      topology_ = nullptr;
    } else if (hwloc_topology_load(topology_) != 0) {
      hwloc_topology_destroy(topology_);
      topology_ = nullptr;
    }
  }
  hwloc_topology_t topology_ = nullptr;
};

class Bitmap {
 public:
  Bitmap() : bitmap_(hwloc_bitmap_alloc()) {}
  ~Bitmap() { hwloc_bitmap_free(bitmap_); }
  Bitmap(const Bitmap&) = delete;
  Bitmap& operator=(const Bitmap&) = delete;
  hwloc_bitmap_t get() const { return bitmap_; }

 private:
  hwloc_bitmap_t bitmap_;
};

// Cores of `type` with at least one hardware thread in both sets.
int CountInside(hwloc_topology_t topology, hwloc_obj_type_t type, hwloc_const_bitmap_t allowed,
                hwloc_const_bitmap_t within) {
  Bitmap both;
  hwloc_bitmap_and(both.get(), allowed, within);
  int count = 0;
  for (hwloc_obj_t o = nullptr; (o = hwloc_get_next_obj_by_type(topology, type, o)) != nullptr;) {
    count += hwloc_bitmap_intersects(o->cpuset, both.get());
  }
  return count;
}

std::optional<std::string> FirstLine(const fs::path& path) {
  std::ifstream in(path);
  std::string line;
  if (!std::getline(in, line)) return std::nullopt;
  return line;
}

// /sys marks the active value with brackets: "always [madvise] never".
std::string TransparentHugePages() {
  const auto line = FirstLine("/sys/kernel/mm/transparent_hugepage/enabled");
  if (!line) return "unsupported";
  const size_t open = line->find('[');
  const size_t close = line->find(']');
  if (open == std::string::npos || close == std::string::npos || close < open) return *line;
  return line->substr(open + 1, close - open - 1);
}

// The limit in one file. None for "max" (cgroup v2) and for the values near 2^63 that mean the same
// in v1.
std::optional<int64_t> LimitIn(const fs::path& path) {
  constexpr int64_t kUnlimited = int64_t{1} << 62;
  const auto line = FirstLine(path);
  int64_t value = 0;
  if (!line || !absl::SimpleAtoi(*line, &value) || value < 0 || value >= kUnlimited) {
    return std::nullopt;
  }
  return value;
}

std::optional<int64_t> Tighter(std::optional<int64_t> a, std::optional<int64_t> b) {
  if (!a || !b) return a ? a : b;
  return std::min(*a, *b);
}

// The tightest limit of `group` (as in /proc/self/cgroup) and its enclosing groups. A container may
// see its own group mounted at the root: then the path does not exist, and only the root counts.
std::optional<int64_t> TightestUpward(const fs::path& root, const std::string& group,
                                      const char* file) {
  std::optional<int64_t> limit = LimitIn(root / file);
  fs::path path = root;
  for (const fs::path& part : fs::path(group).relative_path()) {
    path /= part;
    limit = Tighter(limit, LimitIn(path / file));
  }
  return limit;
}

// Bytes in a line of /proc/self/status, such as "VmSize:     2412 kB"; 0 if there is no such line.
int64_t OwnBytes(const std::string& name) {
  std::ifstream in("/proc/self/status");
  for (std::string line; std::getline(in, line);) {
    int64_t kib = 0;
    if (line.starts_with(name) && line.ends_with(" kB") &&
        absl::SimpleAtoi(line.substr(name.size(), line.size() - name.size() - 3), &kib)) {
      return kib * 1024;
    }
  }
  return 0;
}

// What a limit of this process leaves it. used: the line with what it uses.
std::optional<int64_t> LeftBy(int resource, const std::string& used) {
  constexpr rlim_t kUnlimited = rlim_t{1} << 62;
  rlimit limit = {};
  if (getrlimit(resource, &limit) != 0 || limit.rlim_cur >= kUnlimited) return std::nullopt;
  return std::max<int64_t>(static_cast<int64_t>(limit.rlim_cur) - OwnBytes(used), 0);
}

}  // namespace

int64_t Topology::memory_limit_bytes() const {
  return std::min({memory_bytes, cgroup_memory_limit_bytes.value_or(memory_bytes),
                   process_memory_limit_bytes.value_or(memory_bytes)});
}

std::optional<int64_t> CgroupMemoryLimit(const fs::path& membership, const fs::path& mount) {
  std::optional<int64_t> limit;
  std::ifstream in(membership);
  // Lines are hierarchy:controllers:path. Hierarchy 0, without controllers, is v2.
  for (std::string line; std::getline(in, line);) {
    const size_t first = line.find(':');
    if (first == std::string::npos) continue;
    const size_t second = line.find(':', first + 1);
    if (second == std::string::npos) continue;
    const std::string controllers = line.substr(first + 1, second - first - 1);
    const std::string group = line.substr(second + 1);
    if (controllers.empty()) {
      limit = Tighter(limit, TightestUpward(mount, group, "memory.max"));
      limit = Tighter(limit, TightestUpward(mount / "unified", group, "memory.max"));
    } else if (absl::StrCat(",", controllers, ",").find(",memory,") != std::string::npos) {
      limit = Tighter(limit, TightestUpward(mount / "memory", group, "memory.limit_in_bytes"));
    }
  }
  return limit;
}

absl::StatusOr<Topology> DetectTopology() {
  const absl::StatusOr<hwloc_topology_t> machine = Machine::Get();
  if (!machine.ok()) return machine.status();
  const hwloc_topology_t topology = *machine;

  // The process's CPU binding may be narrower than the cgroup's CPU set, which hwloc already
  // applies.
  Bitmap allowed;
  if (hwloc_get_cpubind(topology, allowed.get(), HWLOC_CPUBIND_PROCESS) != 0) {
    hwloc_bitmap_copy(allowed.get(), hwloc_topology_get_allowed_cpuset(topology));
  }
  const hwloc_obj_t root = hwloc_get_root_obj(topology);
  Topology t;
  t.hardware_thread_count = CountInside(topology, HWLOC_OBJ_PU, allowed.get(), root->cpuset);
  t.core_count = CountInside(topology, HWLOC_OBJ_CORE, allowed.get(), root->cpuset);
  // Some virtual machines show no cores.
  if (t.core_count == 0) t.core_count = t.hardware_thread_count;
  for (hwloc_obj_t o = nullptr;
       (o = hwloc_get_next_obj_by_type(topology, HWLOC_OBJ_NUMANODE, o)) != nullptr;) {
    t.numa_nodes.push_back({CountInside(topology, HWLOC_OBJ_CORE, allowed.get(), o->cpuset),
                            static_cast<int64_t>(o->attr->numanode.local_memory)});
  }
  // Not hwloc's sum over the nodes: it misses memory that a virtual machine got after its start.
  t.memory_bytes = int64_t{sysconf(_SC_PHYS_PAGES)} * sysconf(_SC_PAGESIZE);
  t.cgroup_memory_limit_bytes = CgroupMemoryLimit("/proc/self/cgroup", "/sys/fs/cgroup");
  t.process_memory_limit_bytes =
      Tighter(LeftBy(RLIMIT_AS, "VmSize:"), LeftBy(RLIMIT_DATA, "VmData:"));
  t.transparent_huge_pages = TransparentHugePages();
  return t;
}

absl::Status BindMemory(std::span<std::byte> range, int numa_node) {
  const absl::StatusOr<hwloc_topology_t> machine = Machine::Get();
  if (!machine.ok()) return machine.status();
  const hwloc_obj_t node =
      numa_node < 0 ? nullptr : hwloc_get_obj_by_type(*machine, HWLOC_OBJ_NUMANODE, numa_node);
  if (node == nullptr) {
    return absl::InvalidArgumentError(
        absl::StrCat("NUMA node ", numa_node, " is not in [0, ",
                     hwloc_get_nbobjs_by_type(*machine, HWLOC_OBJ_NUMANODE), ")"));
  }
  if (hwloc_set_area_membind(*machine, range.data(), range.size(), node->nodeset,
                             HWLOC_MEMBIND_BIND, HWLOC_MEMBIND_BYNODESET) != 0) {
    return absl::FailedPreconditionError(absl::StrCat("cannot bind ", range.size(),
                                                      " bytes to NUMA node ", numa_node, ": ",
                                                      std::strerror(errno)));
  }
  return absl::OkStatus();
}

}  // namespace spillway
