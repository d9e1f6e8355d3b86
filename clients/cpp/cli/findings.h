// Checks of a machine that matter to the daemon.
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
  std::string advice;  // if not ok
};

// Limits of the calling process.
struct ProcessLimits {
  int64_t memlock_bytes = 0;  // negative: no limit
  int64_t descriptor_count = 0;
};
ProcessLimits LimitsOfThisProcess();

// Examines the machine through the files below `root`: "/", or a copy for tests.
// memory_limit_bytes: limit of the running daemon; nullopt: no daemon answers, and its default is
// used.
std::vector<Finding> Examine(const std::filesystem::path& root, const ProcessLimits& limits,
                             std::optional<int64_t> memory_limit_bytes);

}  // namespace spillway::cli
