#pragma once

#include <atomic>
#include <cstdint>
#include <list>
#include <memory>
#include <string>

#include "absl/base/thread_annotations.h"
#include "absl/status/statusor.h"
#include "engine/engine.h"
#include "engine/regions.h"
#include "host/base/mutex.h"
#include "services/convert/status.h"

namespace spillway {

// Serves decode steps, and decoders on a GPU, that clients call through regions
// (doorbell_memory.h). Each doorbell has its own thread, which sleeps while the client does not
// ring. So a client that stops in the middle of a step blocks no other client. Thread-safe.
class DoorbellServer {
 public:
  // Doorbells of all clients together.
  static constexpr int64_t kDoorbellCountMax = 512;

  // All must outlive the server.
  DoorbellServer(Engine* engine, RegionTable* regions, const StatusConverter* status)
      : engine_(engine), regions_(regions), status_(status) {}
  // REQUIRES: the regions' sessions have ended.
  ~DoorbellServer();
  DoorbellServer(const DoorbellServer&) = delete;
  DoorbellServer& operator=(const DoorbellServer&) = delete;

  // Creates a region with a doorbell, which is served until the region is detached. Its calls are
  // those of `caller`.
  // data_bytes: room for tensors, raised to DoorbellMemory::kDataBytesMin. Errors as
  // RegionTable::Attach(), and RESOURCE_EXHAUSTED, reason DOORBELL_COUNT_EXHAUSTED or
  // THREADS_EXHAUSTED.
  absl::StatusOr<std::shared_ptr<Region>> Attach(const Caller& caller, const std::string& session,
                                                 int64_t data_bytes) ABSL_LOCKS_EXCLUDED(mutex_);

  // From now on, calls are answered with UNAVAILABLE. Calls that are being served go on.
  void Drain() { draining_ = true; }
  // Calls that are being served.
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
