#include <string>

#include "absl/strings/str_cat.h"
#include "cli/commands.h"
#include "cli/json.h"
#include "cli/output.h"
#include "cli/watch.h"
#include "host/base/status_macros.h"

namespace spillway::cli {
namespace {

Json WorkJson(const v1::WorkStatistics& work) {
  return {{"attend_count", work.attend_count()},
          {"appended_row_count", work.appended_row_count()},
          {"touched_row_count", work.touched_row_count()},
          {"visible_row_count", work.visible_row_count()},
          {"attend_time_us", work.attend_time_us()},
          {"exact_count", work.exact_count()},
          {"statistical_count", work.statistical_count()},
          {"none_count", work.none_count()}};
}

Json StatusJson(const v1::GetServerInfoResponse& info,
                const v1::GetStatisticsResponse& statistics) {
  Json devices = Json::array();
  for (const v1::DeviceInfo& device : info.devices()) {
    devices.push_back({{"name", device.name()},
                       {"description", device.description()},
                       {"thread_count", device.thread_count()},
                       {"simd_target", device.simd_target()},
                       {"uuid", device.uuid()},
                       {"memory_limit_bytes", device.memory_limit_bytes()},
                       {"memory_used_bytes", device.memory_used_bytes()},
                       {"resident_limit_bytes", device.resident_limit_bytes()},
                       {"resident_used_bytes", device.resident_used_bytes()},
                       {"shared_used_bytes", device.shared_used_bytes()},
                       {"mps", device.mps()}});
  }
  Json models = Json::array();
  for (const v1::ModelStatistics& model : statistics.models()) {
    models.push_back({{"model", model.model()},
                      {"sequence_count", model.sequence_count()},
                      {"token_count", model.token_count()},
                      {"free_token_count", model.free_token_count()},
                      {"work", WorkJson(model.work())}});
  }
  const v1::ServerLimits& limits = info.limits();
  const v1::MemoryStatistics& memory = statistics.memory();
  const v1::AuditStatistics& audit = statistics.audit();
  return {{"version", info.version()},
          {"boot_id", info.boot_id()},
          {"start_time", TimeJson(info.has_start_time(), info.start_time())},
          {"page_token_count", info.page_token_count()},
          {"devices", std::move(devices)},
          {"limits",
           {{"message_bytes_max", limits.message_bytes_max()},
            {"memory_bytes_max", limits.memory_bytes_max()},
            {"query_token_count_max", limits.query_token_count_max()},
            {"sparse_query_token_count_max", limits.sparse_query_token_count_max()},
            {"attend_item_count_max", limits.attend_item_count_max()},
            {"sequence_count_max", limits.sequence_count_max()}}},
          {"memory",
           {{"limit_bytes", memory.limit_bytes()},
            {"used_bytes", memory.used_bytes()},
            {"arena_committed_bytes", memory.arena_committed_bytes()},
            {"arena_huge_page_bytes", memory.arena_huge_page_bytes()},
            {"row_bytes", memory.row_bytes()},
            {"index_bytes", memory.index_bytes()},
            {"other_bytes", memory.other_bytes()}}},
          {"work", WorkJson(statistics.work())},
          {"audit",
           {{"share", audit.share()},
            {"check_count", audit.check_count()},
            {"violation_count", audit.violation_count()},
            {"dropped_count", audit.dropped_count()},
            {"raised_head_count", audit.raised_head_count()}}},
          {"models", std::move(models)}};
}

void PrintStatus(const v1::GetServerInfoResponse& info, const v1::GetStatisticsResponse& statistics,
                 std::ostream& out) {
  out << "spillwayd " << info.version() << ", up "
      << FormatAge(absl::Now() - ToTime(info.start_time())) << ", boot " << info.boot_id() << '\n';
  for (const v1::DeviceInfo& device : info.devices()) {
    out << "device    " << device.name() << ": " << device.description();
    if (device.memory_limit_bytes() > 0) {
      out << "; " << FormatBytes(device.memory_used_bytes()) << " of "
          << FormatBytes(device.memory_limit_bytes()) << " of its memory";
    }
    if (device.shared_used_bytes() > 0) {
      out << ", shared with clients " << FormatBytes(device.shared_used_bytes());
    }
    if (device.resident_limit_bytes() > 0) {
      out << ", whole sequences " << FormatBytes(device.resident_used_bytes()) << " of "
          << FormatBytes(device.resident_limit_bytes());
    }
    if (device.mps()) out << "; under MPS";
    out << '\n';
  }
  const v1::MemoryStatistics& memory = statistics.memory();
  out << "memory    " << FormatBytes(memory.used_bytes()) << " of "
      << FormatBytes(memory.limit_bytes()) << " ("
      << FormatShare(static_cast<double>(memory.used_bytes()),
                     static_cast<double>(memory.limit_bytes()))
      << "): rows " << FormatBytes(memory.row_bytes()) << ", index "
      << FormatBytes(memory.index_bytes()) << ", other " << FormatBytes(memory.other_bytes())
      << '\n'
      << "arena     " << FormatBytes(memory.arena_committed_bytes()) << " obtained, "
      << FormatBytes(memory.arena_huge_page_bytes()) << " in huge pages\n";
  const v1::WorkStatistics& work = statistics.work();
  out << "attends   " << FormatCount(work.attend_count()) << ", rows touched "
      << FormatShare(static_cast<double>(work.touched_row_count()),
                     static_cast<double>(work.visible_row_count()))
      << "; promises: exact " << FormatCount(work.exact_count()) << ", statistical "
      << FormatCount(work.statistical_count()) << ", none " << FormatCount(work.none_count())
      << '\n';
  if (const v1::AuditStatistics& audit = statistics.audit(); audit.share() > 0) {
    out << "audit     of " << FormatShare(audit.share(), 1)
        << " of the attends: " << FormatCount(audit.check_count()) << " bounds checked, "
        << FormatShare(static_cast<double>(audit.violation_count()),
                       static_cast<double>(audit.check_count()))
        << " violated; " << FormatCount(audit.raised_head_count()) << " heads raised\n";
  }
  if (statistics.models().empty()) {
    out << "no models\n";
    return;
  }
  out << '\n';
  Table table({"MODEL", "SEQUENCES", "TOKENS", "TOKENS THAT FIT", "ATTENDS", "ROWS TOUCHED"});
  for (const v1::ModelStatistics& model : statistics.models()) {
    table.AddRow({ShortName(model.model()), FormatCount(model.sequence_count()),
                  FormatCount(model.token_count()), FormatCount(model.free_token_count()),
                  FormatCount(model.work().attend_count()),
                  FormatShare(static_cast<double>(model.work().touched_row_count()),
                              static_cast<double>(model.work().visible_row_count()))});
  }
  table.Print(out);
}

}  // namespace

absl::Status Status(Client& client, bool watch, const CallOptions& call, const Output& output) {
  if (watch) {
    return Watch(output.out, output.terminal && !output.json, call.stop, [&](std::ostream& out) {
      return Status(client, false, call, {.out = out, .json = output.json});
    });
  }
  ASSIGN_OR_RETURN(const v1::GetStatisticsResponse statistics, client.GetStatistics("", call));
  if (output.json) {
    output.out << StatusJson(client.server_info(), statistics).dump(2) << '\n';
  } else {
    PrintStatus(client.server_info(), statistics, output.out);
  }
  return absl::OkStatus();
}

}  // namespace spillway::cli
