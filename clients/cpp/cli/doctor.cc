#include <optional>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "cli/commands.h"
#include "cli/findings.h"
#include "cli/json.h"

namespace spillway::cli {

void Doctor(const std::string& target, const Access& access, const Output& output) {
  Finding daemon;
  daemon.what = "daemon";
  std::optional<int64_t> limit_bytes;
  const absl::StatusOr<std::unique_ptr<Client>> client =
      Client::Connect(target, {.connect_timeout = absl::Seconds(1), .access = access});
  if (client.ok()) {
    daemon.found = absl::StrCat((*client)->server_info().version(), " at ", target);
    limit_bytes = (*client)->server_info().limits().memory_bytes_max();
  } else {
    daemon.ok = false;
    daemon.found = absl::StrCat("none at ", target);
    daemon.advice = "start spillwayd, or name one with --target";
  }
  std::vector<Finding> findings = Examine("/", LimitsOfThisProcess(), limit_bytes);
  findings.push_back(daemon);
  if (output.json) {
    Json list = Json::array();
    for (const Finding& finding : findings) {
      list.push_back({{"what", finding.what},
                      {"ok", finding.ok},
                      {"found", finding.found},
                      {"advice", finding.advice}});
    }
    output.out << Json{{"findings", std::move(list)}}.dump(2) << '\n';
    return;
  }
  for (const Finding& finding : findings) {
    output.out << absl::StrFormat("%-4s  %-14s %s\n", finding.ok ? "OK" : "WARN", finding.what,
                                  finding.found);
    if (!finding.ok) output.out << absl::StrFormat("      %-14s %s\n", "", finding.advice);
  }
}

}  // namespace spillway::cli
