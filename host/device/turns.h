#pragma once

#include <list>

#include "absl/base/thread_annotations.h"
#include "host/base/mutex.h"

namespace spillway {

// So many threads at once, and the others in the order in which they came: a thread that
// ends its turn and comes again is behind those that wait. Thread-safe.
class Turns {
 public:
  explicit Turns(int at_once) : free_(at_once) {}
  Turns(const Turns&) = delete;
  Turns& operator=(const Turns&) = delete;

  // Waits for a turn.
  void Begin() ABSL_LOCKS_EXCLUDED(mutex_);
  void End() ABSL_LOCKS_EXCLUDED(mutex_);
  // Threads that wait.
  int waiting_count() const ABSL_LOCKS_EXCLUDED(mutex_);

 private:
  struct Waiter {
    CondVar changed;
    bool may_begin = false;
  };

  mutable Mutex mutex_;
  int free_ ABSL_GUARDED_BY(mutex_);  // not 0 only while nobody waits
  std::list<Waiter*> waiting_ ABSL_GUARDED_BY(mutex_);
};

// A turn, for as long as this lives.
class Turn {
 public:
  explicit Turn(Turns& turns) : turns_(turns) { turns_.Begin(); }
  ~Turn() { turns_.End(); }
  Turn(const Turn&) = delete;
  Turn& operator=(const Turn&) = delete;

 private:
  Turns& turns_;
};

}  // namespace spillway
