#pragma once

#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/time/time.h"

namespace spillway {

// A program that is run to its end, without a shell.
struct HelperProgram {
  std::vector<std::string> arguments;  // the first names it, found in PATH
  std::string input;                   // its standard input
  // Variables of this process's environment that it does not get.
  std::vector<std::string> unset;
  absl::Duration timeout;
  // One that has not ended in time goes on, rather than being killed.
  bool may_go_on = false;
};

struct HelperResult {
  bool ended = false;    // in time
  int exit_status = -1;  // of one that ended; 128 + the signal that ended it
  std::string output;    // standard output and error so far, 4 KiB at most
};

// Runs it in a process group of its own, so that a terminal's signals miss it,
// with no signal blocked, and SIGPIPE not ignored. NOT_FOUND where there is no such program,
// UNAVAILABLE where the system cannot run it. REQUIRES: no other thread changes the environment.
absl::StatusOr<HelperResult> RunHelper(const HelperProgram& program);

}  // namespace spillway
