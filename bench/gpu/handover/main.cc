// spillway-handover-bench measures how long two processes on one GPU take to hand over to each
// other. Each round is a kernel of the runner, a signal, a kernel of the other process (the peer),
// and a signal back. There are three kinds of signal. Without MPS the GPU switches between the
// contexts of the processes, which costs more than any signal; bench/gpu/handover.py runs this
// program with and without MPS.
#include <spawn.h>
#include <sys/wait.h>
#include <unistd.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <chrono>
#include <cmath>
#include <csignal>
#include <cstdlib>
#include <cstring>
#include <iostream>
#include <string>
#include <thread>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "bench/gpu/handover/peer.h"
#include "bench/gpu/handover/runner.h"
#include "bench/gpu/handover/shared_page.h"
#include "host/base/status_macros.h"
#include "nlohmann/json.hpp"

extern char** environ;

namespace spillway::bench {
namespace {

using Json = nlohmann::ordered_json;

enum ExitCode {
  kOk = 0,
  // CUDA or the other process failed, or a kernel found a wrong value of the counter.
  kFailed = 1,
  // Nothing was measured: wrong command line or environment, or no GPU.
  kUnusable = 2,
};

constexpr char kFooter[] =
    "Exit codes: 0 done, 1 CUDA or the other process failed or the counter was wrong, 2 nothing\n"
    "could be measured.";
// The descriptor of the shared page in the other process.
constexpr int kPageFd = 3;
constexpr int64_t kWorkMaxUs = 100'000;
constexpr uint32_t kRoundCountMax = 1'000'000;

struct Options {
  RunnerOptions runner;
  int64_t work_us = 0;
  bool json = false;
  pid_t parent = 0;  // in the peer: the runner's process ID; 0: this process is the runner
  unsigned limit_seconds = 0;
};

int Fail(const absl::Status& status) {
  std::cerr << "spillway-handover-bench: " << status.message() << '\n';
  const bool unusable = absl::IsFailedPrecondition(status) || absl::IsNotFound(status) ||
                        absl::IsInvalidArgument(status);
  return unusable ? kUnusable : kFailed;
}

// Ends the process after so many seconds, in case a call of CUDA never returns.
void EndAfter(unsigned seconds) {
  std::signal(SIGALRM, [](int) {
    constexpr char kMessage[] = "spillway-handover-bench: a call of CUDA does not return\n";
    [[maybe_unused]] const ssize_t count = write(STDERR_FILENO, kMessage, sizeof(kMessage) - 1);
    _exit(kFailed);
  });
  alarm(seconds);
}

// Limit for the whole run: 2 ms plus the work for each round of each signal, and 180 s for the
// start.
unsigned LimitSeconds(const RunnerOptions& options) {
  const double rounds =
      std::size(kSignals) * (static_cast<double>(options.warm_up_count) + options.round_count);
  return static_cast<unsigned>(180 + rounds * (0.002 + static_cast<double>(options.work_ns) / 1e9));
}

absl::StatusOr<pid_t> StartPeer(const Options& options, int page_fd) {
  const std::vector<std::string> arguments = {"spillway-handover-bench",
                                              "--child",
                                              absl::StrCat(getpid()),
                                              "--gpu",
                                              absl::StrCat(options.runner.gpu),
                                              "--limit",
                                              absl::StrCat(options.limit_seconds)};
  std::vector<char*> pointers;
  for (const std::string& argument : arguments) {
    pointers.push_back(const_cast<char*>(argument.c_str()));
  }
  pointers.push_back(nullptr);
  posix_spawn_file_actions_t actions;
  posix_spawn_file_actions_init(&actions);
  // This clears close-on-exec, even if page_fd already is kPageFd.
  int error = posix_spawn_file_actions_adddup2(&actions, page_fd, kPageFd);
  pid_t pid = -1;
  if (error == 0) {
    error = posix_spawn(&pid, "/proc/self/exe", &actions, nullptr, pointers.data(), environ);
  }
  posix_spawn_file_actions_destroy(&actions);
  if (error != 0) return absl::ErrnoToStatus(error, "cannot start the other process");
  return pid;
}

// Waits for the other process, and kills it if it does not end by itself.
absl::Status EndPeer(pid_t pid) {
  using Clock = std::chrono::steady_clock;
  int status = 0;
  for (const Clock::time_point deadline = Clock::now() + std::chrono::seconds(20);;) {
    const pid_t ended = waitpid(pid, &status, WNOHANG);
    if (ended == pid) break;
    if (Clock::now() > deadline) {
      kill(pid, SIGKILL);
      waitpid(pid, &status, 0);
      return absl::DeadlineExceededError("the other process did not end");
    }
    std::this_thread::sleep_for(std::chrono::milliseconds(5));
  }
  if (WIFEXITED(status) && WEXITSTATUS(status) == 0) return absl::OkStatus();
  return absl::AbortedError(
      WIFSIGNALED(status) ? absl::StrCat("signal ", WTERMSIG(status), " ended the other process")
                          : absl::StrCat("the other process ended with ", WEXITSTATUS(status)));
}

std::string NameOf(Signal signal) {
  switch (signal) {
    case Signal::kDeviceFlags:
      return "streams, flags in GPU memory";
    case Signal::kHostFlags:
      return "streams, flags in host memory";
    case Signal::kPolling:
      return "CPUs poll, flags in host memory";
  }
  return "";
}

// The quantile `share` of the sorted values, by nearest rank. REQUIRES: there are values.
double Quantile(const std::vector<double>& sorted, double share) {
  const auto rank = static_cast<size_t>(std::ceil(share * static_cast<double>(sorted.size())));
  return sorted[std::clamp<size_t>(rank, 1, sorted.size()) - 1];
}

Json ToJson(const Options& options, const Result& result) {
  Json signals = Json::array();
  for (const Measured& measured : result.measured) {
    Json signal = {{"signal", NameOf(measured.signal)}};
    if (measured.unavailable.empty()) {
      std::vector<double> sorted = measured.seconds;
      std::sort(sorted.begin(), sorted.end());
      signal["us_median"] = Quantile(sorted, 0.5) * 1e6;
      signal["us_p90"] = Quantile(sorted, 0.9) * 1e6;
      signal["us_min"] = sorted.front() * 1e6;
      signal["us_max"] = sorted.back() * 1e6;
    } else {
      signal["unavailable"] = measured.unavailable;
    }
    signals.push_back(std::move(signal));
  }
  return {{"device", result.gpu_name},
          {"driver_cuda_version",
           absl::StrCat(result.driver_version / 1000, ".", result.driver_version % 1000 / 10)},
          {"runner_has_mps", result.runner_has_mps},
          {"peer_has_mps", result.peer_has_mps},
          {"work_us", options.work_us},
          {"rounds", options.runner.round_count},
          {"warm_up_rounds", options.runner.warm_up_count},
          {"signals", std::move(signals)}};
}

void Print(const Json& record) {
  const bool runner = record["runner_has_mps"];
  const bool peer = record["peer_has_mps"];
  std::cout << record["device"].get<std::string>() << ", "
            << (runner == peer ? (runner ? "with MPS" : "without MPS")
                               : "one process with MPS, one without")
            << ", " << record["work_us"] << " us of work, " << record["rounds"]
            << " rounds; a round, us\n"
            << absl::StreamFormat("%-34s%9s%9s%9s%9s\n", "signal", "median", "p90", "min", "max");
  for (const Json& signal : record["signals"]) {
    std::cout << absl::StreamFormat("%-34s", signal["signal"].get<std::string>());
    if (signal.contains("unavailable")) {
      std::cout << "  " << signal["unavailable"].get<std::string>() << '\n';
      continue;
    }
    for (const char* key : {"us_median", "us_p90", "us_min", "us_max"}) {
      std::cout << absl::StreamFormat("%9.1f", signal[key].get<double>());
    }
    std::cout << '\n';
  }
}

absl::Status RunRunner(const Options& options) {
  ASSIGN_OR_RETURN(SharedPage page, SharedPage::Create());
  // Starts the peer before CUDA is initialised, because CUDA does not work after a fork.
  ASSIGN_OR_RETURN(const pid_t peer, StartPeer(options, page.fd()));
  const absl::StatusOr<Result> result = RunRounds(options.runner, peer, &page);
  const absl::Status ended = EndPeer(peer);
  if (!result.ok()) return result.status();
  RETURN_IF_ERROR(ended);
  const Json record = ToJson(options, *result);
  if (options.json) {
    std::cout << record.dump() << std::endl;
  } else {
    Print(record);
  }
  return std::cout ? absl::OkStatus() : absl::DataLossError("cannot write the output");
}

absl::Status Run(Options options) {
  const char* const blocking = std::getenv("CUDA_LAUNCH_BLOCKING");
  if (blocking != nullptr && std::strcmp(blocking, "0") != 0) {
    return absl::FailedPreconditionError(
        "CUDA_LAUNCH_BLOCKING is set: a launch would wait for a stream that waits for it");
  }
  // With lazy loading, the first launch of a kernel may wait for all streams.
  setenv("CUDA_MODULE_LOADING", "EAGER", 1);
  if (options.parent != 0) {
    EndAfter(options.limit_seconds);
    ASSIGN_OR_RETURN(SharedPage page, SharedPage::Open(kPageFd));
    return RunPeer(options.runner.gpu, options.parent, std::move(page));
  }
  options.runner.work_ns = options.work_us * 1000;
  options.limit_seconds = LimitSeconds(options.runner);
  EndAfter(options.limit_seconds);
  return RunRunner(options);
}

int Main(int argc, char** argv) {
  CLI::App app("What handing over between two processes on one GPU costs.",
               "spillway-handover-bench");
  app.footer(kFooter);
  Options options;
  options.runner.round_count = 5000;
  options.runner.warm_up_count = 500;
  app.add_option("--gpu", options.runner.gpu, "its number")
      ->check(CLI::Range(0, 1023))
      ->capture_default_str();
  app.add_option("--rounds", options.runner.round_count, "timed rounds of a signal")
      ->check(CLI::Range(uint32_t{1}, kRoundCountMax))
      ->capture_default_str();
  app.add_option("--warm-up", options.runner.warm_up_count, "rounds before those")
      ->check(CLI::Range(uint32_t{0}, kRoundCountMax))
      ->capture_default_str();
  app.add_option("--work", options.work_us, "microseconds that the other process's kernel takes")
      ->check(CLI::Range(int64_t{0}, kWorkMaxUs))
      ->capture_default_str();
  app.add_flag("--json", options.json, "one JSON object in place of a table");
  app.add_option("--child", options.parent, "this is the other process, of that one")->group("");
  app.add_option("--limit", options.limit_seconds, "seconds until the process ends")->group("");
  try {
    app.parse(argc, argv);
  } catch (const CLI::ParseError& error) {
    return app.exit(error) == 0 ? kOk : kUnusable;
  }
  const absl::Status status = Run(options);
  if (status.ok()) return kOk;
  // If the peer fails, the runner prints the reason.
  return options.parent != 0 ? kFailed : Fail(status);
}

}  // namespace
}  // namespace spillway::bench

int main(int argc, char** argv) { return spillway::bench::Main(argc, argv); }
