#pragma once

#include <cstdint>
#include <string>

#include "absl/status/status.h"
#include "cli/commands.h"

namespace spillway::cli {

struct NewToken {
  std::string name;
  // Optional fields of the entry; empty or 0: not written.
  std::string name_space;
  std::string bytes_max;
  int64_t sequence_count_max = 0;
  // File to append the entry to; created if it does not exist, with access only for its owner.
  // Empty: the entry is printed.
  std::string file;
};

// Makes a token, prints it once, and writes or prints its entry for a daemon's auth.tokens_file.
// Needs no daemon. INVALID_ARGUMENT if a name is not valid; UNAVAILABLE if the file cannot be
// written.
absl::Status MakeToken(const NewToken& asked, const Output& output);

}  // namespace spillway::cli
