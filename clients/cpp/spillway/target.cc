#include <unistd.h>

#include <cstdlib>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/strip.h"
#include "spillway/client.h"

namespace spillway {

std::string DefaultTarget() {
  const char* named = std::getenv("SPILLWAY_TARGET");
  if (named != nullptr && *named != '\0') return named;
  const char* runtime = std::getenv("XDG_RUNTIME_DIR");
  if (runtime != nullptr && *runtime == '/') {
    return absl::StrCat("unix:", runtime, "/spillway/spillwayd.sock");
  }
  return absl::StrCat("unix:/tmp/spillway-", getuid(), "/spillwayd.sock");
}

std::string NormalizeTarget(const std::string& target) {
  if (absl::StartsWith(target, "/")) return absl::StrCat("unix:", target);
  return std::string(absl::StripPrefix(target, "tcp:"));
}

}  // namespace spillway
