#pragma once

#include <atomic>
#include <cstdint>
#include <list>
#include <memory>
#include <string>

#include "absl/base/thread_annotations.h"
#include "absl/status/statusor.h"
#include "daemon/convert/status.h"
#include "daemon/engine/engine.h"
#include "daemon/engine/regions.h"
#include "host/base/mutex.h"

namespace spillway {

// Answers decode steps, and decoders on a GPU, that clients make through regions
// (doorbell_memory.h says how). A doorbell has a thread of its own, which sleeps while nobody
// rings: a client that stops in the middle of a step holds nothing that another needs. Thread-safe.
class DoorbellServer {
 public:
  // Of all clients.
  static constexpr int64_t kDoorbellCountMax = 512;

  // All outlive the server.
  DoorbellServer(Engine* engine, RegionTable* regions, const StatusConverter* status)
      : engine_(engine), regions_(regions), status_(status) {}
  // REQUIRES: the regions' sessions have ended.
  ~DoorbellServer();
  DoorbellServer(const DoorbellServer&) = delete;
  DoorbellServer& operator=(const DoorbellServer&) = delete;

  // A new region with a doorbell, that is answered until the region is detached. Who rings is
  // the caller.
  // data_bytes: what tensors may take; raised to what every doorbell has. Errors as of
  // RegionTable::Attach, and RESOURCE_EXHAUSTED, reason DOORBELL_COUNT_EXHAUSTED.
  absl::StatusOr<std::shared_ptr<Region>> Attach(const Caller& caller, const std::string& session,
                                                 int64_t data_bytes) ABSL_LOCKS_EXCLUDED(mutex_);

  // From now on calls are answered with UNAVAILABLE; those that are being answered go
  // on.
  void Drain() { draining_ = true; }
  // Calls that are being answered.
  int open_call_count() const { return answering_; }

 private:
  class Line;

  Engine* const engine_;
  RegionTable* const regions_;
  const StatusConverter* const status_;
  std::atomic<bool> draining_ = false;
  mutable std::atomic<int> answering_ = 0;
  Mutex mutex_;
  std::list<std::shared_ptr<Line>> lines_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace spillway
