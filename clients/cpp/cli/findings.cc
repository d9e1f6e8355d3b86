#include "cli/findings.h"

#include <sys/resource.h>

#include <algorithm>
#include <fstream>
#include <sstream>

#include "absl/strings/ascii.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "cli/output.h"

namespace spillway::cli {
namespace {

namespace fs = std::filesystem;

// Each connection, region and saved sequence needs descriptors. The daemon raises its own limit to
// the hard limit.
constexpr int64_t kDescriptorCountWanted = 4096;

// Contents of a file; empty if it cannot be read.
std::string Read(const fs::path& path) {
  std::ifstream file(path);
  std::ostringstream text;
  text << file.rdbuf();
  return std::string(absl::StripAsciiWhitespace(text.str()));
}

// Value of a key in /proc/meminfo, in bytes; 0 if the key does not exist.
int64_t MemInfo(const fs::path& root, const std::string& key) {
  for (const std::string& line :
       std::vector<std::string>(absl::StrSplit(Read(root / "proc/meminfo"), '\n'))) {
    const std::vector<std::string> words = absl::StrSplit(line, ' ', absl::SkipEmpty());
    int64_t kib = 0;
    if (words.size() >= 2 && words[0] == key + ":" && absl::SimpleAtoi(words[1], &kib)) {
      return kib * 1024;
    }
  }
  return 0;
}

Finding HugePages(const fs::path& root) {
  const std::string modes = Read(root / "sys/kernel/mm/transparent_hugepage/enabled");
  const size_t open = modes.find('[');
  const std::string mode =
      open == std::string::npos ? "" : modes.substr(open + 1, modes.find(']') - open - 1);
  if (mode == "always" || mode == "madvise") return {"huge pages", true, mode, ""};
  return {"huge pages", false, mode.empty() ? "the kernel has none" : mode,
          "rows are in pages of 4 KiB: echo madvise > /sys/kernel/mm/transparent_hugepage/enabled"};
}

Finding Memlock(int64_t bytes, bool has_gpu) {
  if (bytes < 0) return {"locked memory", true, "no limit", ""};
  const std::string found = FormatBytes(bytes);
  if (!has_gpu) return {"locked memory", true, found + "; the CPU device locks none", ""};
  return {"locked memory", false, found,
          "drivers may refuse to pin the rows: ulimit -l unlimited, or LimitMEMLOCK=infinity in "
          "the service"};
}

Finding Numa(const fs::path& root) {
  int count = 0;
  std::error_code error;
  for (const auto& entry : fs::directory_iterator(root / "sys/devices/system/node", error)) {
    const std::string name = entry.path().filename().string();
    count += name.starts_with("node") && name.size() > 4 && absl::ascii_isdigit(name[4]) ? 1 : 0;
  }
  if (count <= 1) return {"NUMA", true, "one node", ""};
  return {"NUMA", true,
          absl::StrCat(count, " nodes; numactl --cpunodebind=0 --membind=0 keeps a daemon on one"),
          ""};
}

std::vector<Finding> Gpus(const fs::path& root, bool& has_gpu) {
  std::vector<Finding> findings;
  std::vector<std::string> addresses;
  std::error_code error;
  for (const auto& entry : fs::directory_iterator(root / "proc/driver/nvidia/gpus", error)) {
    addresses.push_back(entry.path().filename().string());
  }
  std::sort(addresses.begin(), addresses.end());
  has_gpu = !addresses.empty();
  if (!has_gpu) return {{"GPU", true, "no NVIDIA driver: attends run on the CPU", ""}};
  const std::string version = Read(root / "proc/driver/nvidia/version");
  findings.push_back({"driver", true, version.substr(0, version.find('\n')), ""});
  for (const std::string& address : addresses) {
    const fs::path device = root / "sys/bus/pci/devices" / address;
    const std::string width = Read(device / "current_link_width");
    const std::string width_max = Read(device / "max_link_width");
    const std::string name = "GPU " + address;
    if (width.empty()) {
      findings.push_back({name, true, "the width of its link is not known", ""});
      continue;
    }
    const std::string found =
        absl::StrCat("PCIe x", width, " of x", width_max, ", ", Read(device / "current_link_speed"),
                     " (links slow down while they idle)");
    findings.push_back({name, width == width_max, found,
                        width == width_max ? ""
                                           : "rows cross this link: check the slot, the riser, and "
                                             "which devices share its lanes"});
  }
  const bool mps = fs::exists(root / "tmp/nvidia-mps/control", error);
  findings.push_back(
      {"MPS", mps, mps ? "its control daemon is running" : "not running",
       mps ? "" : "kernels of other processes and of the daemon take turns: spillwayd --mps on"});
  return findings;
}

Finding Descriptors(int64_t count) {
  const bool ok = count >= kDescriptorCountWanted;
  return {"open files", ok, absl::StrCat(FormatCount(count), " at most"),
          ok ? ""
             : absl::StrCat("more connections have to wait: ulimit -Hn ", kDescriptorCountWanted,
                            ", or LimitNOFILE in the service")};
}

Finding Memory(const fs::path& root, std::optional<int64_t> limit_bytes) {
  const int64_t available = MemInfo(root, "MemAvailable");
  const int64_t limit = limit_bytes.value_or(MemInfo(root, "MemTotal") / 4 * 3);
  const std::string found = absl::StrCat(FormatBytes(available), " free, limit ",
                                         FormatBytes(limit), limit_bytes ? "" : " by default");
  // A running daemon already holds a part of its limit.
  const bool ok = limit_bytes || available >= limit;
  return {"memory", ok, found,
          ok ? ""
             : absl::StrCat("the kernel may kill the daemon before it reaches the limit: spillwayd "
                            "--memory-limit ",
                            available / 10 * 9 >> 20, "MiB")};
}

}  // namespace

ProcessLimits LimitsOfThisProcess() {
  ProcessLimits limits;
  rlimit limit = {};
  getrlimit(RLIMIT_MEMLOCK, &limit);
  limits.memlock_bytes =
      limit.rlim_cur == RLIM_INFINITY ? -1 : static_cast<int64_t>(limit.rlim_cur);
  getrlimit(RLIMIT_NOFILE, &limit);
  limits.descriptor_count =
      static_cast<int64_t>(std::min<rlim_t>(limit.rlim_max, int64_t{1} << 31));
  return limits;
}

std::vector<Finding> Examine(const fs::path& root, const ProcessLimits& limits,
                             std::optional<int64_t> memory_limit_bytes) {
  bool has_gpu = false;
  std::vector<Finding> gpus = Gpus(root, has_gpu);
  std::vector<Finding> findings = {HugePages(root), Numa(root), Memory(root, memory_limit_bytes),
                                   Memlock(limits.memlock_bytes, has_gpu),
                                   Descriptors(limits.descriptor_count)};
  findings.insert(findings.end(), gpus.begin(), gpus.end());
  return findings;
}

}  // namespace spillway::cli
