#include "daemon/http/status_json.h"

#include <algorithm>
#include <map>
#include <optional>

#include "host/policy/policy.h"
#include "nlohmann/json.hpp"

namespace spillway {
namespace {

using Json = nlohmann::json;

// Most heads per model: those with the most violations.
constexpr size_t kHeadCountMax = 12;

template <size_t N>
Json ToJson(const Distribution<N>& values) {
  return {{"bounds", values.bounds()}, {"counts", values.counts()}, {"sum", values.sum()}};
}

Json ToJson(const WorkCounters& work) {
  return {{"attends", work.attend_count.load()},
          {"appended_rows", work.appended_row_count.load()},
          {"touched_rows", work.touched_row_count.load()},
          {"visible_rows", work.visible_row_count.load()},
          {"exact", work.exact_count.load()},
          {"statistical", work.statistical_count.load()},
          {"none", work.none_count.load()}};
}

Json MemoryJson(const Engine& engine) {
  const MemoryBudget& budget = engine.budget();
  Json uses = Json::array();
  for (int use = 0; use < kMemoryUseCount; ++use) {
    const auto kind = static_cast<MemoryUse>(use);
    uses.push_back({{"name", MemoryUseName(kind)}, {"bytes", budget.used_bytes(kind)}});
  }
  return {{"limit_bytes", budget.limit_bytes()}, {"uses", std::move(uses)}};
}

Json AuditJson(const Holdings::OfModel& held) {
  struct OfLayer {
    int64_t checks = 0;
    int64_t violations = 0;
  };
  std::map<int, OfLayer> sums;
  for (const HeadAudit& head : held.heads) {
    sums[head.layer].checks += head.check_count;
    sums[head.layer].violations += head.violation_count;
  }
  Json layers = Json::array();
  for (const auto& [layer, sum] : sums) {
    layers.push_back({{"layer", layer}, {"checks", sum.checks}, {"violations", sum.violations}});
  }
  Json heads = Json::array();
  for (const HeadAudit& head : held.heads) {
    if (heads.size() == kHeadCountMax) break;
    heads.push_back({{"layer", head.layer},
                     {"kv_head", head.kv_head},
                     {"checks", head.check_count},
                     {"violations", head.violation_count},
                     {"level", head.level}});
  }
  return {{"layers", std::move(layers)}, {"heads", std::move(heads)}};
}

Json ModelsJson(const Holdings& holdings) {
  Json models = Json::array();
  for (const Holdings::OfModel& held : holdings.models) {
    if (models.size() == Metrics::kModelCountMax) break;
    const ModelSpec& spec = held.model->spec;
    models.push_back({{"name", held.model->id},
                      {"layers", spec.layer_count},
                      {"kv_heads", spec.kv_head_count},
                      {"sequences", held.sequence_count},
                      {"tokens", held.token_count},
                      {"free_tokens", held.free_token_count},
                      {"delta", held.model->policy.delta},
                      {"work", ToJson(held.model->work)},
                      {"audit", AuditJson(held)}});
  }
  return models;
}

Json DevicesJson(const Engine& engine) {
  const std::vector<DeviceWatch::State> states = engine.device_watch().states();
  Json devices = Json::array();
  for (const Device* part : engine.device().parts()) {
    Json device = {{"name", part->info().name}, {"description", part->info().description}};
    for (const DeviceWatch::State& state : states) {
      if (state.name != part->info().name) continue;
      device["errors"] = state.error_count;
      device["lost"] = state.lost;
    }
    if (const std::optional<DeviceMemory> memory = part->memory()) {
      device["memory_limit_bytes"] = memory->limit_bytes;
      device["memory_used_bytes"] = memory->used_bytes;
      device["copy_bytes"] = memory->resident_used_bytes;
    }
    devices.push_back(std::move(device));
  }
  return devices;
}

}  // namespace

std::string StatusJson(const Metrics& metrics) {
  const Metrics::Sources& sources = metrics.sources();
  const Engine& engine = *sources.engine;
  const Holdings holdings = metrics.CollectHoldings();
  const RebuildProgress rebuild = engine.rebuild_progress();
  const ServerCounts server = sources.server();
  const EngineCounters& counters = engine.counters();
  const Json status = {
      {"version", sources.version},
      {"boot_id", sources.boot_id},
      {"uptime_seconds", absl::ToDoubleSeconds(absl::FromChrono(SteadyNow() - sources.started))},
      {"not_ready", sources.not_ready()},
      {"memory", MemoryJson(engine)},
      {"model_count", holdings.models.size()},
      {"sequence_count", holdings.sequence_count},
      {"token_count", holdings.token_count},
      {"models", ModelsJson(holdings)},
      {"work", ToJson(engine.work())},
      {"attend", ToJson(counters.attend)},
      {"attend_wait", ToJson(counters.attend_wait)},
      {"attend_device", ToJson(counters.attend_device)},
      {"link_bytes", counters.moved_bytes.load()},
      {"audit_share", engine.auditor() == nullptr ? 0.0 : engine.auditor()->share()},
      {"rebuild",
       {{"sequences", rebuild.sequence_count},
        {"done", rebuild.done_count},
        {"failed", rebuild.failed_count}}},
      {"devices", DevicesJson(engine)},
      {"device_losses", {{"count", sources.losses.count}, {"last", sources.losses.last}}},
      {"connections",
       {{"open", server.open_connection_count},
        {"shed", server.shed_connection_count},
        {"ended", server.ended_connection_count}}},
      {"open_calls", server.open_call_count},
      {"open_streams", server.open_stream_count},
      {"drain_seconds_left",
       server.drain_seconds_left.has_value() ? Json(*server.drain_seconds_left) : Json()},
      {"dropped_log_lines", server.dropped_log_line_count}};
  return status.dump();
}

}  // namespace spillway
