#pragma once

#include <cstdint>
#include <thread>

#include "absl/base/thread_annotations.h"
#include "host/base/descriptor.h"
#include "host/base/mutex.h"
#include "services/log/event_log.h"

namespace spillway {

// The last resort against clients that make gRPC hold memory in a way that the ConnectionShield
// does not know. Runs a thread that reads the process's own memory many times a second. While it is
// above the bound, the thread ends the connection that has opened most streams lately, and logs it.
class MemoryWatch {
 public:
  // What the process may hold besides what its budget counts: its program, its threads, gRPC's
  // buffers, and memory that the allocator has not given back yet.
  static constexpr int64_t kAllowanceBytes = int64_t{256} << 20;

  // limit_bytes: all that the daemon's settings let it hold. What the process holds already, such
  // as the memory of a GPU's driver, is added to it. The event log must outlive this.
  MemoryWatch(int64_t limit_bytes, EventLog& events);
  ~MemoryWatch();
  MemoryWatch(const MemoryWatch&) = delete;
  MemoryWatch& operator=(const MemoryWatch&) = delete;

 private:
  void Run() ABSL_LOCKS_EXCLUDED(mutex_);
  // The process's resident memory that is not of files or shared; 0 if it cannot be read.
  int64_t HeldBytes() const;

  const Descriptor statm_;
  const int64_t bound_bytes_;
  EventLog& events_;
  Mutex mutex_;
  CondVar wake_;
  bool stopped_ ABSL_GUARDED_BY(mutex_) = false;
  std::thread thread_;
};

}  // namespace spillway
