#pragma once

#include <string>

#include "absl/status/statusor.h"
#include "services/config/config.h"

namespace spillway {

// The first of $STATE_DIRECTORY/snapshots (set by systemd), $XDG_STATE_HOME/spillway/snapshots and
// $HOME/.local/state/spillway/snapshots whose variable is an absolute path; empty if there is none.
std::string DefaultSnapshotFolder();

struct CommandLine {
  Config config;
  std::string file;  // the file that --config names; empty: none
  bool print_config = false;
  // If not empty: print this and exit with exit_code instead of serving.
  std::string message;
  int exit_code = 0;
};

// Flags override the file that --config names, which overrides the defaults. INVALID_ARGUMENT names
// an unknown key in the file, or a value that does not parse or is out of range, such as a memory
// limit above the machine's memory. It also refuses settings that do not fit together, such as MPS
// on the CPU, TLS for a unix socket, a certificate without its key, or tokens without TLS beyond
// loopback unless allowed.
absl::StatusOr<CommandLine> ParseCommandLine(int argc, const char* const* argv,
                                             const Topology& topology, const std::string& version);

}  // namespace spillway
