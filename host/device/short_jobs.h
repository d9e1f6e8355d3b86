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
// jobs that differ by less do not interrupt one another.
//
// A thread inside a long job calls Pause() every few hundred rows. There it runs an iteration of
// a loop that a short job has open, so that several threads help with one step, or, if it is
// a worker of the device, a short job that waits. It gives no more time than it spends on long
// jobs (HelpCredit), and finishes what it has begun; what it runs there is not interrupted again.
// So a long job keeps half of every thread's time although steps never stop, and a step that needs
// more than was saved up for it has the other half.
//
// Thread-safe.
class ShortJobs {
 public:
  static constexpr int64_t kShare = 4;

  // A job that nobody has begun.
  struct Waiting {
    int64_t owner = 0;
    int64_t work = 0;
    std::function<void()> run;  // does all of it and tells whom it concerns
  };

  ShortJobs() = default;
  ShortJobs(const ShortJobs&) = delete;
  ShortJobs& operator=(const ShortJobs&) = delete;

  // The job waits for RunNext(), or for a worker that is inside a longer one. REQUIRES: a call of
  // RunNext() follows.
  void Push(Waiting job) ABSL_LOCKS_EXCLUDED(mutex_);
  // For a worker that is free: runs the next that waits, long or short. Owners take turns, and one
  // owner's come in the order in which they came. Nothing, if a worker inside another took it.
  void RunNext() ABSL_LOCKS_EXCLUDED(mutex_);

  // f(i) for every i of [0, count), once each and in any order, for a job of so much work: by the
  // workers of this arena and by threads that pause inside longer jobs. There, f runs in a
  // SerialScope.
  void Loop(int64_t work, int64_t count, const std::function<void(int64_t)>& f)
      ABSL_LOCKS_EXCLUDED(mutex_);
  // Between two parts of a job of so much work: short ones go first, and every now and then other
  // threads that wait for the core. The caller holds no lock, and nothing that a part of any job
  // would wait for.
  void Pause(int64_t work) ABSL_LOCKS_EXCLUDED(mutex_);

  // Whether this thread runs something inside a Pause(). What it asks for there (a completion may
  // submit a job) others should do: it would hold up both jobs.
  static bool Paused() { return paused_; }

  // While one lives this thread begins no job that waits: it is a caller's, who is told of his
  // job as soon as it is done, and other jobs' completions would keep him. It still helps loops.
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

  // Helps once with what is short beside so much work. False: there is nothing.
  bool Help(int64_t work) ABSL_LOCKS_EXCLUDED(mutex_);
  // A loop with an iteration left, which is the caller's.
  OpenLoop* Claim(int64_t work_max, int64_t& index) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  std::optional<Waiting> Take(int64_t work_max) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void Unlist(OpenLoop& loop) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void AddWork(int64_t work) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void RemoveWork(int64_t work) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  inline static thread_local bool paused_ = false;
  inline static thread_local bool callers_ = false;

  Mutex mutex_;
  std::list<OpenLoop*> loops_ ABSL_GUARDED_BY(mutex_);  // the first opened first
  std::list<Waiting> waiting_ ABSL_GUARDED_BY(mutex_);  // the first come first
  FairOrder order_ ABSL_GUARDED_BY(mutex_);
  std::multiset<int64_t> works_ ABSL_GUARDED_BY(mutex_);  // of both
  // The least of them: a pause beside nothing that is short costs a glance.
  std::atomic<int64_t> least_work_ = std::numeric_limits<int64_t>::max();
};

}  // namespace spillway
