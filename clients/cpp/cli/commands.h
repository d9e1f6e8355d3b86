// The subcommands of the tool. Each asks one daemon and prints the answer;
// none knows the command line.
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
  // Whether a terminal shows it.
  bool terminal = false;
};

// Version, devices, memory, and per model what it holds and how many tokens
// still fit. watch: anew each second, until it is stopped.
absl::Status Status(Client& client, bool watch, const CallOptions& call, const Output& output);

// Tokens a second, latencies, memory and models, of the second before, over and over until it is
// stopped, or once.
absl::Status Top(Client& client, bool once, const CallOptions& call, const Output& output);

// What of this machine would slow the daemon down or end it, a line each; without a daemon, too.
void Doctor(const std::string& target, const Access& access, const Output& output);

// Every model's shape, and bytes per token.
absl::Status Models(Client& client, const CallOptions& call, const Output& output);

// Every sequence, or those of one model (models/{id} or {id}).
absl::Status Sequences(Client& client, const std::string& model, const CallOptions& call,
                       const Output& output);

// Deletes each (models/{id} or {id}); the errors of those that stay.
std::vector<absl::Status> DeleteModels(Client& client, const std::vector<std::string>& names,
                                       const CallOptions& call, const Output& output);
// The same of sequences.
std::vector<absl::Status> DeleteSequences(Client& client, const std::vector<std::string>& names,
                                          const CallOptions& call, const Output& output);

// Times attends over a temporary sequence of random K/V; deletes what it made
// whatever happens.
absl::Status AttendBench(Client& client, const BenchOptions& options, const CallOptions& call,
                         const Output& output);

}  // namespace spillway::cli
