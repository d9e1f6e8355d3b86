#include "services/metrics/metrics.h"

#include <algorithm>
#include <limits>
#include <map>
#include <optional>
#include <utility>

#include "absl/strings/str_cat.h"
#include "host/device/queue_waits.h"

namespace spillway {
namespace {

using Labels = MetricSeries::Labels;

// Builds the list of metric families.
class Families {
 public:
  void Counter(const char* name, const char* help) { Begin(name, help, MetricType::kCounter); }
  void Gauge(const char* name, const char* help) { Begin(name, help, MetricType::kGauge); }
  void Histogram(const char* name, const char* help) { Begin(name, help, MetricType::kHistogram); }

  // Adds a value to the family that was begun last.
  void Value(double value, Labels labels = {}) {
    families_.back().series.push_back({.labels = std::move(labels), .value = value});
  }
  void Value(int64_t value, Labels labels = {}) {
    Value(static_cast<double>(value), std::move(labels));
  }
  template <size_t N>
  void Values(const Distribution<N>& values, Labels labels = {}) {
    MetricSeries series = {.labels = std::move(labels), .value = values.sum()};
    const typename Distribution<N>::Counts counts = values.counts();
    int64_t sum = 0;
    for (size_t i = 0; i <= N; ++i) {
      sum += static_cast<int64_t>(counts[i]);
      series.upper_bounds.push_back(i < N ? values.bounds()[i]
                                          : std::numeric_limits<double>::infinity());
      series.cumulative_counts.push_back(sum);
    }
    families_.back().series.push_back(std::move(series));
  }

  std::vector<MetricFamily> Take() { return std::move(families_); }

 private:
  void Begin(const char* name, const char* help, MetricType type) {
    families_.push_back({name, help, type, {}});
  }

  std::vector<MetricFamily> families_;
};

const char* NameOf(MemoryUse use) {
  switch (use) {
    case MemoryUse::kPages:
      return "pages";
    case MemoryUse::kModels:
      return "models";
    case MemoryUse::kTables:
      return "tables";
    case MemoryUse::kWorkspaces:
      return "workspaces";
    case MemoryUse::kMessages:
      return "messages";
    case MemoryUse::kOther:
      break;
  }
  return "other";
}

void AddServer(const Metrics::Sources& sources, Families& families) {
  families.Gauge("spillway_build_info", "Always 1; the label is the daemon's version.");
  families.Value(1.0, {{"version", sources.version}});
  families.Gauge("spillway_start_time_seconds",
                 "When the daemon started, seconds since the epoch.");
  families.Value(absl::ToDoubleSeconds(sources.start_time - absl::UnixEpoch()));
  families.Gauge("spillway_ready", "1 if the daemon accepts new work, otherwise 0; see /readyz.");
  families.Value(sources.not_ready().empty() ? 1.0 : 0.0);
  const ServerCounts server = sources.server();
  families.Gauge("spillway_connections", "Open gRPC connections.");
  families.Value(server.open_connection_count);
  families.Gauge("spillway_open_calls",
                 "Unary calls that are running, including those of doorbells.");
  families.Value(server.open_call_count);
  families.Gauge("spillway_open_streams", "Open streams: appends, decodes, fetches and uploads.");
  families.Value(server.open_stream_count);
  families.Gauge("spillway_draining",
                 "1 if the daemon drains: it accepts no new work and ends soon. Otherwise 0.");
  families.Value(server.drain_seconds_left.has_value() ? 1.0 : 0.0);
  families.Gauge("spillway_drain_left_seconds",
                 "Time left for the running calls and streams of a daemon that drains.");
  families.Value(server.drain_seconds_left.value_or(0));
  families.Counter("spillway_connections_shed_total",
                   "Connections that were closed at once because the limit was reached.");
  families.Value(server.shed_connection_count);
  families.Counter(
      "spillway_connections_ended_total",
      "gRPC connections that were ended because their clients sent what no gRPC client "
      "sends, or nothing; see connection_ended in the log.");
  families.Value(server.ended_connection_count);
  families.Counter("spillway_log_lines_dropped_total",
                   "Log lines that were dropped because the reader was too slow.");
  families.Value(server.dropped_log_line_count);
}

void AddCalls(const CallCounters& calls, Families& families) {
  families.Counter("spillway_requests_total", "gRPC calls that ended, by method and status.");
  for (const auto& method : calls.methods()) {
    for (size_t code = 0; code < method->counts.size(); ++code) {
      const int64_t count = method->counts[code].load(std::memory_order_relaxed);
      if (count == 0) continue;
      families.Value(count,
                     {{"method", method->method},
                      {"status", absl::StatusCodeToString(static_cast<absl::StatusCode>(code))}});
    }
  }
  families.Histogram("spillway_request_duration_seconds",
                     "Duration of gRPC calls; of streams until their end.");
  for (const auto& method : calls.methods()) {
    const bool called = std::any_of(method->counts.begin(), method->counts.end(),
                                    [](const std::atomic<int64_t>& count) { return count != 0; });
    if (called) families.Values(method->seconds, {{"method", method->method}});
  }
}

void AddWork(const Engine& engine, Families& families) {
  const WorkCounters& work = engine.work();
  const EngineCounters& counters = engine.counters();
  families.Counter("spillway_attends_total",
                   "Attends served, one per query token, layer and sequence.");
  families.Value(work.attend_count);
  families.Counter("spillway_rows_appended_total",
                   "Rows appended, one per token, layer and KV head.");
  families.Value(work.appended_row_count);
  families.Counter("spillway_rows_touched_total", "Rows read by attends.");
  families.Value(work.touched_row_count);
  families.Counter("spillway_rows_visible_total", "Rows that those attends could have read.");
  families.Value(work.visible_row_count);
  families.Counter("spillway_rows_moved_total",
                   "Rows read that were copied to a GPU over its link.");
  families.Value(counters.moved_row_count);
  families.Counter("spillway_link_bytes_total",
                   "Bytes of the rows that were copied over the link.");
  families.Value(counters.moved_bytes);
  families.Histogram("spillway_attend_wait_seconds",
                     "Time from a request to attend at a layer until the earlier calls of its "
                     "sequences are done.");
  families.Values(counters.attend_wait);
  families.Histogram("spillway_attend_duration_seconds",
                     "Time from a request to attend at a layer until its answer.");
  families.Values(counters.attend);
  families.Histogram("spillway_attend_device_seconds", "Device time of a layer's attends.");
  families.Values(counters.attend_device);
  families.Histogram(
      "spillway_attend_stage_seconds",
      "Time of the stages of a layer's attends. On a GPU each is of the whole layer. On a CPU "
      "append and dense are; the others are of one query and KV head.");
  for (size_t i = 0; i < kJobStageNames.size(); ++i) {
    families.Values(counters.attend_stages.Of(static_cast<JobStage>(i)),
                    {{"stage", kJobStageNames[i]}});
  }
  families.Counter("spillway_certificates_total",
                   "Certificates by kind of error bound, one per attend and query head.");
  families.Value(work.exact_count, {{"promise", "exact"}});
  families.Value(work.statistical_count, {{"promise", "statistical"}});
  families.Value(work.none_count, {{"promise", "none"}});
  families.Histogram("spillway_certified_relative_error",
                     "Finite relative errors of certificates that are not exact.");
  families.Values(counters.certified_errors);
}

void AddMemory(const Engine& engine, Families& families) {
  const MemoryBudget& budget = engine.budget();
  families.Gauge("spillway_memory_limit_bytes", "Limit on all host memory of the daemon.");
  families.Value(budget.limit_bytes());
  families.Gauge("spillway_memory_bytes",
                 "Host memory that counts against the limit, by use; pages are rows and codes.");
  for (int use = 0; use < kMemoryUseCount; ++use) {
    const auto kind = static_cast<MemoryUse>(use);
    families.Value(budget.used_bytes(kind), {{"use", NameOf(kind)}});
  }
  const ArenaStatistics arena = engine.arena().statistics();
  families.Gauge("spillway_arena_used_bytes", "The part of the memory for pages that is in use.");
  families.Value(arena.used_bytes);
  families.Gauge("spillway_arena_huge_page_bytes",
                 "The part of the memory for pages that is in huge pages.");
  families.Value(arena.huge_page_bytes);
}

void AddDevices(const Engine& engine, const PastLosses& losses, Families& families) {
  families.Counter("spillway_device_losses_total",
                   "Number of times that a device was lost and the daemon restarted in place.");
  families.Value(losses.count);
  families.Counter("spillway_device_errors_total",
                   "Jobs that failed because of an error of the device.");
  const std::vector<DeviceWatch::State> states = engine.device_watch().states();
  for (const DeviceWatch::State& state : states) {
    families.Value(state.error_count, {{"device", state.name}});
  }
  families.Gauge("spillway_device_lost",
                 "1 if a device is lost and every job on it fails, otherwise 0.");
  for (const DeviceWatch::State& state : states) {
    families.Value(state.lost ? 1.0 : 0.0, {{"device", state.name}});
  }
  const std::vector<const Device*> parts = engine.device().parts();
  families.Histogram("spillway_device_queue_seconds",
                     "Time that jobs waited in a device's queue: steps are decode steps, long are "
                     "all other jobs.");
  for (const Device* part : parts) {
    const QueueWaits* const waits = part->queue_waits();
    if (waits == nullptr) continue;
    for (const JobKind kind : kJobKinds) {
      families.Values(waits->Of(kind), {{"device", part->info().name},
                                        {"kind", kind == JobKind::kStep ? "step" : "long"}});
    }
  }
  const auto add_memory = [&](int64_t DeviceMemory::*bytes) {
    for (const Device* part : parts) {
      if (const std::optional<DeviceMemory> memory = part->memory()) {
        families.Value((*memory).*bytes, {{"device", part->info().name}});
      }
    }
  };
  families.Gauge("spillway_device_memory_limit_bytes",
                 "Limit on a GPU's memory for codes, copies of rows and workspaces.");
  add_memory(&DeviceMemory::limit_bytes);
  families.Gauge("spillway_device_memory_bytes", "GPU memory that codes and workspaces use now.");
  add_memory(&DeviceMemory::used_bytes);
  families.Gauge("spillway_device_copy_bytes",
                 "GPU memory that copies of all rows of sequences have now. They make room for "
                 "codes.");
  add_memory(&DeviceMemory::resident_used_bytes);
}

// Layers beyond this number share one series.
constexpr int kLayerCountMax = 256;

std::string LayerName(int layer) {
  return layer < kLayerCountMax ? absl::StrCat(layer) : absl::StrCat(kLayerCountMax, "+");
}

void AddAudit(const Engine& engine, const Holdings& holdings, size_t model_count,
              Families& families) {
  struct OfLayer {
    int64_t check_count = 0;
    int64_t violation_count = 0;
  };
  std::vector<std::map<int, OfLayer>> layers(model_count);
  for (size_t i = 0; i < model_count; ++i) {
    for (const HeadAudit& head : holdings.models[i].heads) {
      OfLayer& layer = layers[i][std::min(head.layer, kLayerCountMax)];
      layer.check_count += head.check_count;
      layer.violation_count += head.violation_count;
    }
  }
  const auto add = [&](int64_t OfLayer::*field) {
    for (size_t i = 0; i < model_count; ++i) {
      for (const auto& [layer, sums] : layers[i]) {
        families.Value(sums.*field,
                       {{"model", holdings.models[i].model->id}, {"layer", LayerName(layer)}});
      }
    }
  };
  const Auditor* const auditor = engine.auditor();
  families.Gauge("spillway_audit_share",
                 "Share of the attends that the audit checks; 0: no audit.");
  families.Value(auditor == nullptr ? 0.0 : auditor->share());
  families.Counter(
      "spillway_audit_checks_total",
      "Statistical error bounds that were checked against exact attention, one per query head.");
  add(&OfLayer::check_count);
  families.Counter("spillway_audit_violations_total",
                   "Checked outputs whose relative error exceeds epsilon.");
  add(&OfLayer::violation_count);
  families.Counter(
      "spillway_audit_dropped_total",
      "Attends that were chosen for a check, but not checked because the queue was full.");
  families.Value(auditor == nullptr ? int64_t{0} : auditor->dropped_count());
  families.Gauge(
      "spillway_audit_raised_heads",
      "KV heads that get more rows than by their policy, because their bounds were violated.");
  for (size_t i = 0; i < model_count; ++i) {
    const std::vector<HeadAudit>& heads = holdings.models[i].heads;
    families.Value(int64_t{std::count_if(heads.begin(), heads.end(),
                                         [](const HeadAudit& head) { return head.level > 0; })},
                   {{"model", holdings.models[i].model->id}});
  }
}

void AddHoldings(const Engine& engine, const Holdings& holdings, size_t model_count,
                 Families& families) {
  const RebuildProgress rebuild = engine.rebuild_progress();
  families.Gauge("spillway_models", "Models.");
  families.Value(static_cast<int64_t>(holdings.models.size()));
  families.Gauge("spillway_sequences", "Sequences.");
  families.Value(holdings.sequence_count);
  families.Counter("spillway_sequences_expired_total",
                   "Sequences that the daemon deleted: idle, because no call named them for their "
                   "ttl, or abandoned, because their clients were gone and had not named them.");
  const EngineCounters& counters = engine.counters();
  families.Value(counters.idle_expiry_count, {{"why", "idle"}});
  families.Value(counters.abandoned_expiry_count, {{"why", "abandoned"}});
  families.Gauge("spillway_clients", "Clients with an open Connect stream.");
  families.Value(engine.clients().there_count());
  families.Gauge("spillway_tokens", "Tokens held, over all sequences.");
  families.Value(holdings.token_count);
  families.Gauge("spillway_rebuild_sequences",
                 "Sequences found at the start, whose codes are computed again.");
  families.Value(rebuild.sequence_count);
  families.Gauge("spillway_rebuild_done_sequences",
                 "Sequences found at the start that are served again.");
  families.Value(rebuild.done_count);
  families.Gauge("spillway_rebuild_failed_sequences",
                 "Sequences found at the start that cannot be served again.");
  families.Value(rebuild.failed_count);
  families.Gauge(
      "spillway_restore_lost_records",
      "Models, sequences and other records that were damaged at the start and are lost.");
  families.Value(rebuild.lost_count);
  families.Gauge("spillway_restore_damaged_sequences",
                 "Sequences that were cut at the start, because rows were damaged.");
  families.Value(rebuild.damaged_count);
  families.Gauge("spillway_rebuild_row_bytes", "Bytes of rows whose codes were computed again.");
  families.Value(rebuild.row_bytes);
  const auto add = [&](const auto& value) {
    for (size_t i = 0; i < model_count; ++i) {
      const Holdings::OfModel& held = holdings.models[i];
      families.Value(value(held), {{"model", held.model->id}});
    }
  };
  families.Gauge("spillway_model_sequences", "Sequences of a model.");
  add([](const Holdings::OfModel& held) { return held.sequence_count; });
  families.Gauge("spillway_model_tokens", "Tokens of all sequences of a model.");
  add([](const Holdings::OfModel& held) { return held.token_count; });
  families.Gauge("spillway_model_free_tokens", "Tokens of a model that still fit into memory.");
  add([](const Holdings::OfModel& held) { return held.free_token_count; });
  families.Counter("spillway_model_attended_tokens_total",
                   "Query tokens of a model that were attended in every layer.");
  add([](const Holdings::OfModel& held) {
    return held.model->work.attend_count.load() / held.model->spec.layer_count;
  });
}

}  // namespace

Holdings Metrics::CollectHoldings() const {
  constexpr int64_t kAll = std::numeric_limits<int64_t>::max();
  const Engine& engine = *sources_.engine;
  Holdings holdings;
  std::map<const Model*, size_t> places;
  for (const std::shared_ptr<Model>& model : engine.registry().ListModels("", kAll).items) {
    holdings.models.push_back({.model = model,
                               .free_token_count = engine.FreeTokenCount(*model),
                               .heads = model->audits.Heads()});
  }
  std::stable_sort(holdings.models.begin(), holdings.models.end(),
                   [](const Holdings::OfModel& a, const Holdings::OfModel& b) {
                     return a.model->create_time < b.model->create_time;
                   });
  for (size_t i = 0; i < holdings.models.size(); ++i) places[holdings.models[i].model.get()] = i;
  for (const auto& sequence : engine.registry().ListSequences(nullptr, "", kAll).items) {
    const int64_t token_count = sequence->snapshot().token_count;
    ++holdings.sequence_count;
    holdings.token_count += token_count;
    const auto place = places.find(sequence->model.get());
    if (place == places.end()) continue;
    ++holdings.models[place->second].sequence_count;
    holdings.models[place->second].token_count += token_count;
  }
  return holdings;
}

std::vector<MetricFamily> Metrics::Collect() const {
  const Engine& engine = *sources_.engine;
  const Holdings holdings = CollectHoldings();
  const size_t model_count = std::min(holdings.models.size(), kModelCountMax);
  Families families;
  AddServer(sources_, families);
  AddCalls(*sources_.calls, families);
  AddWork(engine, families);
  AddMemory(engine, families);
  AddDevices(engine, sources_.losses, families);
  AddHoldings(engine, holdings, model_count, families);
  AddAudit(engine, holdings, model_count, families);
  return families.Take();
}

}  // namespace spillway
