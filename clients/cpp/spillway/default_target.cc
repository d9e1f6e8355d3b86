#include <unistd.h>

#include <cstdlib>

#include "absl/strings/str_cat.h"
#include "spillway/client.h"

namespace spillway {

std::string DefaultTarget() {
  const char* runtime = std::getenv("XDG_RUNTIME_DIR");
  if (runtime != nullptr && *runtime == '/') {
    return absl::StrCat("unix:", runtime, "/spillway/spillwayd.sock");
  }
  return absl::StrCat("unix:/tmp/spillway-", getuid(), "/spillwayd.sock");
}

}  // namespace spillway
