#pragma once

#include <cstdint>
#include <list>

#include "absl/base/thread_annotations.h"
#include "host/base/mutex.h"
#include "host/device/fair_order.h"

namespace spillway {

// Lets a limited number of threads have a turn at the same time. Owners that wait take turns, and
// the threads of one owner are served in order of arrival: a thread that ends its turn and asks
// again goes behind those that wait. Thread-safe.
class Turns {
 public:
  explicit Turns(int at_once) : free_(at_once) {}
  Turns(const Turns&) = delete;
  Turns& operator=(const Turns&) = delete;

  // Waits for a turn.
  void Begin(int64_t owner = 0) ABSL_LOCKS_EXCLUDED(mutex_);
  void End() ABSL_LOCKS_EXCLUDED(mutex_);
  // Number of threads that wait.
  int waiting_count() const ABSL_LOCKS_EXCLUDED(mutex_);

 private:
  struct Waiter {
    int64_t owner = 0;
    CondVar changed;
    bool may_begin = false;
  };

  mutable Mutex mutex_;
  int free_ ABSL_GUARDED_BY(mutex_);  // 0 while a thread waits
  std::list<Waiter*> waiting_ ABSL_GUARDED_BY(mutex_);
  FairOrder order_ ABSL_GUARDED_BY(mutex_);
};

// Holds a turn while it lives.
class Turn {
 public:
  explicit Turn(Turns& turns, int64_t owner = 0) : turns_(turns) { turns_.Begin(owner); }
  ~Turn() { turns_.End(); }
  Turn(const Turn&) = delete;
  Turn& operator=(const Turn&) = delete;

 private:
  Turns& turns_;
};

}  // namespace spillway
