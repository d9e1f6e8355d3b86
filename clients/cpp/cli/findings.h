// What of a machine matters to the daemon.
#pragma once

#include <cstdint>
#include <filesystem>
#include <optional>
#include <string>
#include <vector>

namespace spillway::cli {

struct Finding {
  std::string what;  // "huge pages"
  bool ok = true;
  std::string found;
  std::string advice;  // where it is not ok
};

// What is asked of the process that looks.
struct ProcessLimits {
  int64_t memlock_bytes = 0;  // negative: none
  int64_t descriptor_count = 0;
};
ProcessLimits LimitsOfThisProcess();

// What the files of a machine say, below `root`: "/", or a copy for tests.
// memory_limit_bytes: the daemon's, where one answers; else what it would take by default.
std::vector<Finding> Examine(const std::filesystem::path& root, const ProcessLimits& limits,
                             std::optional<int64_t> memory_limit_bytes);

}  // namespace spillway::cli
