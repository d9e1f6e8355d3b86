// The subcommands of the tool. They print to an Output, and know nothing of the command line.
#pragma once

#include <ostream>
#include <stop_token>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "cli/bench_options.h"
#include "spillway/client.h"

namespace spillway::cli {

// Where and how a command prints.
struct Output {
  std::ostream& out;
  // One JSON document instead of text for people.
  bool json = false;
  // The output is a terminal.
  bool terminal = false;
};

// Prints version, devices and memory, and for each model its size and how many more tokens fit.
// watch: prints again every second until it is stopped.
absl::Status Status(Client& client, bool watch, const CallOptions& call, const Output& output);

// Prints tokens per second, latencies, memory and models, measured over the last second. once:
// prints one measurement; otherwise repeats until it is stopped.
absl::Status Top(Client& client, bool once, const CallOptions& call, const Output& output);

// Checks this machine for settings that slow the daemon down or can get it killed. Prints one line
// per finding. Works without a daemon.
void Doctor(const std::string& target, const Access& access, const Output& output);

// Prints the shape of every model, and its bytes per token.
absl::Status Models(Client& client, const CallOptions& call, const Output& output);

// Prints every sequence, or those of one model (models/{id} or {id}).
absl::Status Sequences(Client& client, const std::string& model, const CallOptions& call,
                       const Output& output);

// Deletes each model (models/{id} or {id}). Returns the errors of those that were not deleted.
std::vector<absl::Status> DeleteModels(Client& client, const std::vector<std::string>& names,
                                       const CallOptions& call, const Output& output);
// The same for sequences.
std::vector<absl::Status> DeleteSequences(Client& client, const std::vector<std::string>& names,
                                          const CallOptions& call, const Output& output);

// The same for snapshots, which have the names of their folders.
std::vector<absl::Status> DeleteSnapshots(Client& client, const std::vector<std::string>& names,
                                          const CallOptions& call, const Output& output);

// Times attends over a temporary sequence of random K/V. Deletes what it created, even after an
// error.
absl::Status AttendBench(Client& client, const BenchOptions& options, const CallOptions& call,
                         const Output& output);

}  // namespace spillway::cli
