#pragma once

#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/time/time.h"

namespace spillway {

// A program to run without a shell.
struct HelperProgram {
  std::vector<std::string> arguments;  // the first is the name of the program, found in PATH
  std::string input;                   // standard input
  // Environment variables of this process that the program does not get.
  std::vector<std::string> unset;
  absl::Duration timeout;
  // If true, a program that has not ended in time continues to run. If false, it is killed.
  bool may_go_on = false;
};

struct HelperResult {
  bool ended = false;    // within the timeout
  int exit_status = -1;  // if it ended; 128 + signal number if a signal ended it
  std::string output;    // the first 4 KiB of standard output and standard error so far
};

// Runs the program in its own process group, so that signals of a terminal do not reach it, with no
// signal blocked and SIGPIPE not ignored. NOT_FOUND if there is no such program; UNAVAILABLE if the
// system cannot run it. REQUIRES: no other thread changes the environment.
absl::StatusOr<HelperResult> RunHelper(const HelperProgram& program);

}  // namespace spillway
