#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/time/time.h"
#include "engine/engine.h"
#include "services/metrics/call_counters.h"
#include "services/metrics/metric_family.h"

namespace spillway {

// Counts that the engine does not know.
struct ServerCounts {
  int64_t open_connection_count = 0;
  int64_t shed_connection_count = 0;
  int64_t ended_connection_count = 0;
  int64_t dropped_log_line_count = 0;
  int64_t open_call_count = 0;    // running unary calls of work, and doorbell calls
  int64_t open_stream_count = 0;  // appends, decodes, fetches, uploads
  // Seconds of grace left; none if the daemon does not drain.
  std::optional<double> drain_seconds_left;
};

// Devices that the predecessors of this process lost before they restarted in place.
struct PastLosses {
  int64_t count = 0;
  std::string last;  // the device and the reason
};

// All models with sums over their sequences. Collecting this visits every model and sequence.
struct Holdings {
  struct OfModel {
    std::shared_ptr<Model> model;
    int64_t sequence_count = 0;
    int64_t token_count = 0;
    int64_t free_token_count = 0;
    std::vector<HeadAudit> heads;  // only heads that were checked
  };
  std::vector<OfModel> models;  // oldest first
  int64_t sequence_count = 0;
  int64_t token_count = 0;
};

// All numbers about the daemon, declared once: /metrics, the status page and GetStatistics use
// them. Events are counted where they happen, without locks. The counts are collected here only on
// request (docs/adr/0046). Thread-safe.
class Metrics {
 public:
  // Only so many models, the oldest, have their own series, so that a scrape stays small whatever
  // clients create. Totals include all models.
  static constexpr size_t kModelCountMax = 16;

  // Why the daemon should get no new work, for people; empty if it is ready.
  using NotReady = std::function<std::string()>;

  struct Sources {
    const Engine* engine = nullptr;
    const CallCounters* calls = nullptr;
    std::function<ServerCounts()> server;
    NotReady not_ready;
    std::string version;
    std::string boot_id;
    absl::Time start_time;  // a date; durations are measured from `started`
    SteadyTime started;
    PastLosses losses;
  };
  // All objects in `sources` must outlive this.
  explicit Metrics(Sources sources) : sources_(std::move(sources)) {}

  const Sources& sources() const { return sources_; }
  Holdings CollectHoldings() const;
  // All families, including those without series.
  std::vector<MetricFamily> Collect() const;

 private:
  const Sources sources_;
};

}  // namespace spillway
