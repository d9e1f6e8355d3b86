#include "cli/watch.h"

#include <condition_variable>
#include <mutex>
#include <sstream>
#include <string>

#include "absl/strings/str_replace.h"

namespace spillway::cli {

bool WaitFor(absl::Duration time, const std::stop_token& stop) {
  std::mutex mutex;
  std::condition_variable_any never;
  std::unique_lock<std::mutex> lock(mutex);
  never.wait_for(lock, stop, absl::ToChronoMilliseconds(time), [] { return false; });
  return !stop.stop_requested();
}

absl::Status Watch(std::ostream& out, bool terminal, const std::stop_token& stop,
                   absl::FunctionRef<absl::Status(std::ostream&)> print) {
  for (bool first = true;; first = false) {
    std::ostringstream text;
    if (absl::Status status = print(text); !status.ok()) {
      return stop.stop_requested() ? absl::OkStatus() : status;
    }
    if (terminal) {
      // Overwrites the last output from the top left corner: clears the rest of each line, and the
      // screen below.
      out << (first ? "\x1b[2J" : "") << "\x1b[H"
          << absl::StrReplaceAll(text.str(), {{"\n", "\x1b[K\n"}}) << "\x1b[J";
    } else {
      out << (first ? "" : "\n") << text.str();
    }
    out.flush();
    if (!out) return absl::DataLossError("cannot write the output");
    if (!WaitFor(absl::Seconds(1), stop)) return absl::OkStatus();
  }
}

}  // namespace spillway::cli
