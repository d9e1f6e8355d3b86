#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/time/time.h"
#include "daemon/engine/engine.h"
#include "daemon/metrics/call_counters.h"
#include "prometheus/metric_family.h"

namespace spillway {

// What is known outside the engine.
struct ServerCounts {
  int64_t open_connection_count = 0;
  int64_t shed_connection_count = 0;
  int64_t dropped_log_line_count = 0;
  int64_t open_call_count = 0;    // unary calls of work, and those of doorbells
  int64_t open_stream_count = 0;  // appends, decodes, fetches, uploads
  // Of the grace; none: the daemon does not drain.
  std::optional<double> drain_seconds_left;
};

// Devices that processes before this one have lost, in whose place it runs.
struct PastLosses {
  int64_t count = 0;
  std::string last;  // the device and why
};

// What models and sequences come to, which takes a look at each of them.
struct Holdings {
  struct OfModel {
    std::shared_ptr<Model> model;
    int64_t sequence_count = 0;
    int64_t token_count = 0;
    int64_t free_token_count = 0;
    std::vector<HeadAudit> heads;  // that were checked
  };
  std::vector<OfModel> models;  // the oldest first
  int64_t sequence_count = 0;
  int64_t token_count = 0;
};

// Everything that can be told of the daemon in numbers, declared once: /metrics, the status page
// and GetStatistics all say this. Numbers are counted where things happen, without locks, and
// collected here only when somebody asks (docs/adr/0046). Thread-safe.
class Metrics {
 public:
  // Models with series of their own, the oldest ones: a scrape stays bounded whatever
  // clients create. Totals have all.
  static constexpr size_t kModelCountMax = 16;

  // Why the daemon should get no new work, for people; empty: it should.
  using NotReady = std::function<std::string()>;

  struct Sources {
    const Engine* engine = nullptr;
    const CallCounters* calls = nullptr;
    std::function<ServerCounts()> server;
    NotReady not_ready;
    std::string version;
    std::string boot_id;
    absl::Time start_time;
    PastLosses losses;
  };
  // What the sources name outlives this.
  explicit Metrics(Sources sources) : sources_(std::move(sources)) {}

  const Sources& sources() const { return sources_; }
  Holdings CollectHoldings() const;
  // Every family, those without series too.
  std::vector<prometheus::MetricFamily> Collect() const;

 private:
  const Sources sources_;
};

}  // namespace spillway
