#include <algorithm>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "cli/commands.h"
#include "cli/json.h"
#include "cli/output.h"
#include "cli/reading.h"
#include "cli/watch.h"
#include "host/base/status_macros.h"

namespace spillway::cli {
namespace {

constexpr char kAttended[] = "spillway_model_attended_tokens_total";

std::string FormatRate(double rate) {
  return rate >= 100 || rate == 0 ? FormatCount(static_cast<int64_t>(rate + 0.5))
                                  : absl::StrFormat("%.1f", rate);
}

std::string Bytes(double bytes) { return FormatBytes(static_cast<int64_t>(bytes)); }
std::string Count(double count) { return FormatCount(static_cast<int64_t>(count)); }

std::string FormatTime(std::optional<double> seconds) {
  if (!seconds) return "-";
  if (*seconds < 1e-3) return absl::StrFormat("%.0f us", *seconds * 1e6);
  if (*seconds < 1) return absl::StrFormat("%.2f ms", *seconds * 1e3);
  return absl::StrFormat("%.2f s", *seconds);
}

struct ModelLine {
  std::string name;
  double sequences = 0;
  double tokens = 0;
  double free_tokens = 0;
  double rate = 0;
};

std::vector<ModelLine> ModelsOf(const Reading& before, const Reading& now) {
  std::vector<ModelLine> lines;
  for (const std::string& model : now.LabelsOf("spillway_model_tokens", "model")) {
    const Reading::Labels labels = {{"model", model}};
    lines.push_back({model, now.Value("spillway_model_sequences", labels),
                     now.Value("spillway_model_tokens", labels),
                     now.Value("spillway_model_free_tokens", labels),
                     Rate(before, now, kAttended, labels)});
  }
  std::stable_sort(lines.begin(), lines.end(),
                   [](const ModelLine& a, const ModelLine& b) { return a.rate > b.rate; });
  return lines;
}

void PrintTop(const std::string& version, const Reading& before, const Reading& now,
              std::ostream& out) {
  const auto percentile = [&](const char* name, double part) {
    return FormatTime(now.Percentile(&before, name, part));
  };
  const auto rise = [&](const char* name) { return now.Value(name) - before.Value(name); };
  const std::vector<ModelLine> models = ModelsOf(before, now);
  double rate = 0;
  for (const ModelLine& model : models) rate += model.rate;
  const absl::Time start =
      absl::FromUnixSeconds(static_cast<int64_t>(now.Value("spillway_start_time_seconds")));
  out << "spillwayd " << version << ", "
      << (now.Value("spillway_ready") > 0 ? "ready" : "not ready") << ", up "
      << FormatAge(absl::Now() - start) << '\n'
      << "tokens    " << FormatRate(rate) << "/s attended; " << Count(now.Value("spillway_tokens"))
      << " held by " << Count(now.Value("spillway_sequences")) << " sequences\n"
      << "attends   p50 " << percentile("spillway_attend_duration_seconds", 0.5) << ", p99 "
      << percentile("spillway_attend_duration_seconds", 0.99) << "; device p50 "
      << percentile("spillway_attend_device_seconds", 0.5) << ", wait p99 "
      << percentile("spillway_attend_wait_seconds", 0.99) << '\n'
      << "rows      "
      << FormatShare(rise("spillway_rows_touched_total"), rise("spillway_rows_visible_total"))
      << " of the visible read; " << Bytes(Rate(before, now, "spillway_link_bytes_total"))
      << "/s over the link\n"
      << "memory    " << Bytes(now.Sum("spillway_memory_bytes")) << " of "
      << Bytes(now.Value("spillway_memory_limit_bytes")) << " ("
      << FormatShare(now.Sum("spillway_memory_bytes"), now.Value("spillway_memory_limit_bytes"))
      << ")\n         ";
  const char* separator = " ";
  for (const std::string& use : now.LabelsOf("spillway_memory_bytes", "use")) {
    const double bytes = now.Value("spillway_memory_bytes", {{"use", use}});
    if (bytes == 0) continue;
    out << std::exchange(separator, ", ") << use << ' ' << Bytes(bytes);
  }
  out << '\n';
  if (now.Value("spillway_audit_share") > 0) {
    const double checks = now.Sum("spillway_audit_checks_total");
    out << "audit     " << Count(checks) << " bounds checked, "
        << FormatShare(now.Sum("spillway_audit_violations_total"), checks) << " violated; "
        << Count(now.Sum("spillway_audit_raised_heads")) << " heads raised\n";
  }
  out << "clients   " << Count(now.Value("spillway_connections")) << " connections, "
      << Count(now.Value("spillway_connections_shed_total")) << " closed at once; "
      << Count(now.Sum("spillway_device_errors_total")) << " device errors, "
      << Count(now.Value("spillway_log_lines_dropped_total")) << " log lines dropped\n";
  if (models.empty()) {
    out << "no models\n";
    return;
  }
  out << '\n';
  Table table({"MODEL", "SEQUENCES", "TOKENS", "TOKENS THAT FIT", "TOKENS/S"});
  for (const ModelLine& model : models) {
    table.AddRow({model.name, Count(model.sequences), Count(model.tokens), Count(model.free_tokens),
                  FormatRate(model.rate)});
  }
  table.Print(out);
}

Json TopJson(const Reading& before, const Reading& now) {
  const auto percentiles = [&](const char* name) -> Json {
    const auto at = [&](double part) -> Json {
      const std::optional<double> value = now.Percentile(&before, name, part);
      return value ? Json(*value) : Json(nullptr);
    };
    return {{"p50", at(0.5)}, {"p99", at(0.99)}};
  };
  Json uses;
  for (const std::string& use : now.LabelsOf("spillway_memory_bytes", "use")) {
    uses[use] = now.Value("spillway_memory_bytes", {{"use", use}});
  }
  Json models = Json::array();
  for (const ModelLine& model : ModelsOf(before, now)) {
    models.push_back({{"model", model.name},
                      {"sequence_count", model.sequences},
                      {"token_count", model.tokens},
                      {"free_token_count", model.free_tokens},
                      {"tokens_per_second", model.rate}});
  }
  return {{"ready", now.Value("spillway_ready") > 0},
          {"seconds", absl::ToDoubleSeconds(absl::FromChrono(now.time() - before.time()))},
          {"attend_seconds", percentiles("spillway_attend_duration_seconds")},
          {"attend_device_seconds", percentiles("spillway_attend_device_seconds")},
          {"attend_wait_seconds", percentiles("spillway_attend_wait_seconds")},
          {"memory_bytes", std::move(uses)},
          {"memory_limit_bytes", now.Value("spillway_memory_limit_bytes")},
          {"connection_count", now.Value("spillway_connections")},
          {"models", std::move(models)}};
}

}  // namespace

absl::Status Top(Client& client, bool once, const CallOptions& call, const Output& output) {
  const auto look = [&]() -> absl::StatusOr<Reading> {
    ASSIGN_OR_RETURN(const std::vector<v1::MetricFamily> families, client.GetMetrics(call));
    return Reading(families, SteadyNow());
  };
  ASSIGN_OR_RETURN(Reading before, look());
  // Every figure is a difference between two readings.
  if (!WaitFor(absl::Seconds(1), call.stop)) return absl::OkStatus();
  const std::string& version = client.server_info().version();
  const auto print = [&](std::ostream& out) -> absl::Status {
    ASSIGN_OR_RETURN(Reading now, look());
    if (output.json) {
      out << TopJson(before, now).dump(once ? 2 : -1) << '\n';
    } else {
      PrintTop(version, before, now, out);
    }
    before = std::move(now);
    return absl::OkStatus();
  };
  if (once) return print(output.out);
  return Watch(output.out, output.terminal && !output.json, call.stop, print);
}

}  // namespace spillway::cli
