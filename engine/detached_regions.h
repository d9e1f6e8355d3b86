#pragma once

#include <cstdint>
#include <list>
#include <memory>
#include <utility>

#include "absl/base/thread_annotations.h"
#include "engine/account_charge.h"
#include "host/base/mutex.h"
#include "host/memory/memory_budget.h"
#include "host/memory/shared_memory.h"

namespace spillway {

// Memory of regions that have ended. Its pages are free, but a client that keeps a descriptor or a
// mapping can allocate them again by writing there. So the memory stays charged until no process
// holds it. Thread-safe.
class DetachedRegions {
 public:
  // Memory, and what it is charged to.
  struct Held {
    std::unique_ptr<SharedMemory> memory;
    MemoryReservation reservation;
    AccountCharge charge;
  };

  // Frees the pages.
  void Take(Held held) ABSL_LOCKS_EXCLUDED(mutex_);
  // Ends the charges for memory that no process holds any more.
  void Collect() ABSL_LOCKS_EXCLUDED(mutex_);
  // From now on, pages keep their content: this process ends, and a client may still be reading the
  // last answer at a doorbell.
  void KeepContent() ABSL_LOCKS_EXCLUDED(mutex_);
  int64_t count() const ABSL_LOCKS_EXCLUDED(mutex_);

 private:
  mutable Mutex mutex_;
  bool keeps_content_ ABSL_GUARDED_BY(mutex_) = false;
  std::list<Held> held_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace spillway
