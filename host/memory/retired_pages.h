#pragma once

#include <cstdint>
#include <deque>
#include <set>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "host/base/mutex.h"
#include "host/memory/page_table.h"

namespace spillway {

// Pages that nothing refers to any more, but that work which has begun may still use. Thread-safe.
class RetiredPages {
 public:
  using Work = uint64_t;

  // Work begins that may use pages of any table.
  Work Begin() ABSL_LOCKS_EXCLUDED(mutex_);
  void End(Work work) ABSL_LOCKS_EXCLUDED(mutex_);
  // Releases the pages when all work that has begun by now has ended. Returns whether they are
  // released at once.
  bool Retire(std::vector<PageTable> tables) ABSL_LOCKS_EXCLUDED(mutex_);
  // Whether no work has begun that has not ended.
  bool idle() const ABSL_LOCKS_EXCLUDED(mutex_);

 private:
  struct Retired {
    Work next;  // the first work that began later
    std::vector<PageTable> tables;
  };

  mutable Mutex mutex_;
  Work next_ ABSL_GUARDED_BY(mutex_) = 1;
  std::set<Work> running_ ABSL_GUARDED_BY(mutex_);
  std::deque<Retired> retired_ ABSL_GUARDED_BY(mutex_);  // the oldest first
};

}  // namespace spillway
