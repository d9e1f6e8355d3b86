#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <limits>
#include <list>
#include <optional>
#include <set>

#include "absl/base/thread_annotations.h"
#include "host/base/mutex.h"
#include "host/device/fair_order.h"

namespace spillway {

// Lets short jobs go before long ones on a device that computes in threads of the host. A job is
// short beside another if its work (host/device/job_work.h) is at most a quarter of the other's;
// jobs that differ by less do not interrupt each other.
//
// A thread inside a long job calls Pause() every few hundred rows. There it runs an iteration of a
// loop that a short job has open, so that several threads help with one step. If it is a worker of
// the device, it may also run a short job that waits. It spends no more time on this than on long
// jobs (HelpCredit). It finishes what it has begun, and is not interrupted again meanwhile. So a
// long job keeps half of every thread's time even if steps never stop, and a step that needs more
// than the saved credit has the other half.
//
// Thread-safe.
class ShortJobs {
 public:
  static constexpr int64_t kShare = 4;

  // A job that no thread has begun.
  struct Waiting {
    int64_t owner = 0;
    int64_t work = 0;
    std::function<void()> run;  // runs the whole job and calls its completion
  };

  ShortJobs() = default;
  ShortJobs(const ShortJobs&) = delete;
  ShortJobs& operator=(const ShortJobs&) = delete;

  // Adds a job. It waits for RunNext(), or for a worker that is inside a longer job. REQUIRES: a
  // call of RunNext() follows.
  void Push(Waiting job) ABSL_LOCKS_EXCLUDED(mutex_);
  // For a free worker: runs the next job that waits, long or short. Owners take turns, and the jobs
  // of one owner run in order of arrival. Does nothing if a worker inside another job has taken the
  // job.
  void RunNext() ABSL_LOCKS_EXCLUDED(mutex_);

  // Calls f(i) for every i of [0, count), once each and in any order, for a job of this much work:
  // in the workers of this arena, and in threads that pause inside longer jobs. In the latter, f
  // runs in a SerialScope.
  void Loop(int64_t work, int64_t count, const std::function<void(int64_t)>& f)
      ABSL_LOCKS_EXCLUDED(mutex_);
  // Called between two parts of a job of this much work. Lets short jobs go first and, every now
  // and then, other threads that wait for the core. The caller must hold no lock, and nothing that
  // a part of any job would wait for.
  void Pause(int64_t work) ABSL_LOCKS_EXCLUDED(mutex_);

  // Whether this thread runs something inside a Pause(). A job that is submitted there (by a
  // completion) should run in other threads: in this one it would delay both jobs.
  static bool Paused() { return paused_; }

  // While one lives, this thread begins no waiting job. It belongs to a caller, which must learn of
  // its own job as soon as that is done; completions of other jobs would delay it. It still helps
  // with loops.
  class CallersThread {
   public:
    CallersThread() : outer_(callers_) { callers_ = true; }
    ~CallersThread() { callers_ = outer_; }
    CallersThread(const CallersThread&) = delete;
    CallersThread& operator=(const CallersThread&) = delete;

   private:
    const bool outer_;
  };

 private:
  struct OpenLoop {
    int64_t work = 0;
    int64_t count = 0;
    const std::function<void(int64_t)>* f = nullptr;
    std::atomic<int64_t> next = 0;
    bool listed = true;
    int helper_count = 0;
    CondVar helped;
  };

  // Helps once with a loop or job that is short beside this much work. False: there is none.
  bool Help(int64_t work) ABSL_LOCKS_EXCLUDED(mutex_);
  // A loop with an iteration left, which is then the caller's: `index`. Null: there is none.
  OpenLoop* Claim(int64_t work_max, int64_t& index) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  std::optional<Waiting> Take(int64_t work_max) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void Unlist(OpenLoop& loop) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void AddWork(int64_t work) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void RemoveWork(int64_t work) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  inline static thread_local bool paused_ = false;
  inline static thread_local bool callers_ = false;

  Mutex mutex_;
  std::list<OpenLoop*> loops_ ABSL_GUARDED_BY(mutex_);  // in the order in which they opened
  std::list<Waiting> waiting_ ABSL_GUARDED_BY(mutex_);  // in order of arrival
  FairOrder order_ ABSL_GUARDED_BY(mutex_);
  std::multiset<int64_t> works_ ABSL_GUARDED_BY(mutex_);  // of all loops and waiting jobs
  // The least of works_. So Pause() takes no lock if nothing is short beside its job.
  std::atomic<int64_t> least_work_ = std::numeric_limits<int64_t>::max();
};

}  // namespace spillway
