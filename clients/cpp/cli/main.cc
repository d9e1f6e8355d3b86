// The command line tool `spillway`: shows the state of a daemon, deletes its models and sequences,
// measures it, makes tokens, and says what a model takes.
#include <unistd.h>

#include <CLI/CLI.hpp>
#include <array>
#include <cstdlib>
#include <fstream>
#include <iostream>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "cli/bench_options.h"
#include "cli/commands.h"
#include "cli/interrupt.h"
#include "cli/lab.h"
#include "cli/tokens.h"
#include "cli/usage.h"
#include "spillway/client.h"
#include "spillway/error.h"

namespace spillway::cli {
namespace {

enum ExitCode {
  kOk = 0,
  // The daemon answered with an error, or the output could not be written.
  kFailed = 1,
  // The command line is wrong.
  kUsage = 2,
  // No daemon answers at the target.
  kUnreachable = 3,
};

constexpr char kFooter[] =
    "Exit codes: 0 success, 1 the daemon refused the call or failed, 2 wrong command line,\n"
    "3 no daemon at the target, 128 + N ended by signal N.";

void PrintError(const absl::Status& status) {
  std::cerr << "spillway: " << status.message() << " (" << absl::StatusCodeToString(status.code());
  if (const std::string reason = ErrorReason(status); !reason.empty()) std::cerr << ", " << reason;
  std::cerr << ")\n";
}

int Main(int argc, char** argv) {
  CLI::App app("Client of the Spillway daemon.", "spillway");
  app.footer(kFooter);
  app.require_subcommand(1);
  app.set_version_flag("--version", SPILLWAY_VERSION);
  std::string target = DefaultTarget();
  std::string format = "table";
  double timeout_s = 60;
  app.add_option("--target", target,
                 "address of the daemon: unix:/path, host:port or tls:host:port")
      ->envname("SPILLWAY_TARGET")
      ->capture_default_str();
  app.add_option("--format", format, "format of the output")
      ->check(CLI::IsMember({"table", "json"}))
      ->type_name("FORMAT")
      ->capture_default_str();
  app.add_option("--timeout", timeout_s, "seconds that one call may take")
      ->check(CLI::PositiveNumber)
      ->capture_default_str();
  Access access = DefaultAccess();
  app.add_option(
         "--tls-ca", access.tls_ca,
         "PEM file with the authorities that sign the daemon's certificate, for tls:host:port")
      ->envname("SPILLWAY_TLS_CA");
  app.add_option("--tls-cert", access.tls_certificate, "PEM file with the client's certificate")
      ->envname("SPILLWAY_TLS_CERT");
  app.add_option("--tls-key", access.tls_key, "PEM file with the key of --tls-cert")
      ->envname("SPILLWAY_TLS_KEY");
  // The token itself is not an option, because other users can see command lines.
  std::string token_file;
  app.add_option("--token-file", token_file,
                 "file whose first line is the token; by default the token is in SPILLWAY_TOKEN");
  // Global options may also follow the subcommand.
  app.fallthrough();

  CLI::App* status = app.add_subcommand("status", "show the daemon, its memory and its models");
  bool watch = false;
  status->add_flag("--watch", watch, "show it again every second until stopped");
  std::vector<std::string> names;
  const auto add_deletion = [&names](CLI::App* list, const std::string& what) {
    CLI::App* deletion = list->add_subcommand("delete", "delete " + what + " by name or id");
    deletion->add_option("name", names, "names or ids, as the list shows them")->required();
    return deletion;
  };
  CLI::App* models = app.add_subcommand("models", "list models or delete them");
  CLI::App* delete_models = add_deletion(models, "models");
  CLI::App* sequences = app.add_subcommand("sequences", "list sequences or delete them");
  std::string model;
  sequences->add_option("--model", model, "list only sequences of this model");
  CLI::App* delete_sequences = add_deletion(sequences, "sequences");
  CLI::App* snapshots = app.add_subcommand("snapshots", "delete snapshots");
  snapshots->require_subcommand(1);
  CLI::App* delete_snapshots = snapshots->add_subcommand("delete", "delete snapshots by folder");
  delete_snapshots->add_option("folder", names, "folders, as they were given when saving")
      ->required();
  CLI::App* bench =
      app.add_subcommand("attend-bench", "time attends over a temporary random sequence");
  BenchOptions bench_options;
  AddBenchOptions(*bench, bench_options);
  CLI::App* top = app.add_subcommand("top", "show tokens per second, latencies and memory, live");
  bool once = false;
  top->add_flag("--once", once, "measure for one second, print once and exit");
  CLI::App* doctor =
      app.add_subcommand("doctor", "check this machine for what would slow the daemon down");
  CLI::App* tokens = app.add_subcommand("tokens", "make tokens for a daemon that requires them");
  tokens->require_subcommand(1);
  NewToken asked;
  CLI::App* new_token = tokens->add_subcommand(
      "new", "make a token; it is shown only once, and the daemon's file has only its digest");
  new_token->add_option("name", asked.name, "name of the token, for example of its user")
      ->required();
  new_token->add_option("--namespace", asked.name_space,
                        "namespace of its models and sequences; by default the name");
  new_token->add_option("--bytes-max", asked.bytes_max,
                        "most bytes of rows and codes in the namespace, such as 64GiB");
  new_token
      ->add_option("--sequence-count-max", asked.sequence_count_max,
                   "most sequences in the namespace")
      ->check(CLI::PositiveNumber);
  new_token->add_option("--file", asked.file,
                        "append the entry to this file instead of printing it");
  CLI::App* size = app.add_subcommand(
      "size", "say what a model takes and what fits; spillway-lab size --help has the options");
  // All that follows is for spillway-lab.
  size->prefix_command();
  size->fallthrough(false);
  try {
    app.parse(argc, argv);
  } catch (const CLI::ParseError& error) {
    // --help and --version.
    if (error.get_exit_code() == 0) return app.exit(error);
    std::cerr << "spillway: " << UsageMessage(app, error) << "\nRun with --help for more.\n";
    return kUsage;
  }

  if (size->parsed()) {
    std::vector<std::string> words = size->remaining();
    if (format == "json") words.emplace_back("--json");
    PrintError(RunLabSize(words));
    return kFailed;
  }

  Interrupt interrupt;
  const auto finish = [&](const absl::Status& result, ExitCode code) -> int {
    if (interrupt.signal() != 0) return 128 + interrupt.signal();
    if (!result.ok()) PrintError(result);
    return code;
  };
  const CallOptions call{.stop = interrupt.token()};
  const Output output{
      .out = std::cout, .json = format == "json", .terminal = isatty(STDOUT_FILENO) == 1};
  if (new_token->parsed()) {
    const absl::Status made = MakeToken(asked, output);
    std::cout.flush();
    if (made.ok() && !std::cout) {
      return finish(absl::DataLossError("cannot write the output"), kFailed);
    }
    return finish(made, made.ok() ? kOk : absl::IsInvalidArgument(made) ? kUsage : kFailed);
  }
  if (!token_file.empty()) {
    // It may be a pipe, but not an endless line.
    std::ifstream file(token_file);
    std::array<char, 4096> line;
    if (!file.getline(line.data(), line.size())) {
      return finish(
          absl::InvalidArgumentError(absl::StrCat("--token-file: ", token_file,
                                                  " cannot be read, is empty, or has a line of ",
                                                  line.size(), " bytes or more")),
          kUsage);
    }
    access.token = line.data();
  }
  if (doctor->parsed()) {
    Doctor(target, access, output);
    return finish(absl::OkStatus(), kOk);
  }
  const ClientOptions options{.call_timeout = absl::Seconds(timeout_s), .access = access};
  absl::StatusOr<std::unique_ptr<Client>> client = Client::Connect(target, options);
  if (!client.ok()) {
    const absl::Status& why = client.status();
    if (absl::IsInvalidArgument(why)) return finish(why, kUsage);
    const bool reached = absl::IsFailedPrecondition(why) || absl::IsUnauthenticated(why);
    return finish(why, reached ? kFailed : kUnreachable);
  }
  absl::Status result;
  if (status->parsed()) result = Status(**client, watch, call, output);
  if (top->parsed()) result = Top(**client, once, call, output);
  std::vector<absl::Status> failures;
  if (delete_models->parsed()) {
    failures = DeleteModels(**client, names, call, output);
  } else if (models->parsed()) {
    result = Models(**client, call, output);
  }
  if (delete_sequences->parsed()) {
    failures = DeleteSequences(**client, names, call, output);
  } else if (sequences->parsed()) {
    result = Sequences(**client, model, call, output);
  }
  if (delete_snapshots->parsed()) failures = DeleteSnapshots(**client, names, call, output);
  if (bench->parsed()) result = AttendBench(**client, bench_options, call, output);
  for (const absl::Status& failure : failures) {
    if (interrupt.signal() == 0) PrintError(failure);
  }
  if (!failures.empty()) return finish(result, kFailed);
  if (!result.ok()) return finish(result, kFailed);
  std::cout.flush();
  if (!std::cout) return finish(absl::DataLossError("cannot write the output"), kFailed);
  return kOk;
}

}  // namespace
}  // namespace spillway::cli

int main(int argc, char** argv) { return spillway::cli::Main(argc, argv); }
