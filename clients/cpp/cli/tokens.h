#pragma once

#include <cstdint>
#include <string>

#include "absl/status/status.h"
#include "cli/commands.h"

namespace spillway::cli {

struct NewToken {
  std::string name;
  // What its entry says; empty and 0 where it says nothing.
  std::string name_space;
  std::string bytes_max;
  int64_t sequence_count_max = 0;
  // The file that the entry is appended to, made where it is not there, for its owner alone; empty:
  // the entry is printed.
  std::string file;
};

// Makes a token, prints it once, and writes or prints the entry of a daemon's auth.tokens_file.
// Asks no daemon. INVALID_ARGUMENT for a name that none can have; UNAVAILABLE where the file cannot
// be written.
absl::Status MakeToken(const NewToken& asked, const Output& output);

}  // namespace spillway::cli
