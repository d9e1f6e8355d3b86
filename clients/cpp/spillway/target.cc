#include <cstdlib>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/strip.h"
#include "host/base/default_socket.h"
#include "spillway/client.h"

namespace spillway {

std::string DefaultTarget() {
  const char* named = std::getenv("SPILLWAY_TARGET");
  if (named != nullptr && *named != '\0') return named;
  return absl::StrCat("unix:", DefaultSocketPath());
}

std::string NormalizeTarget(const std::string& target) {
  if (absl::StartsWith(target, "/")) return absl::StrCat("unix:", target);
  return std::string(absl::StripPrefix(target, "tcp:"));
}

}  // namespace spillway
