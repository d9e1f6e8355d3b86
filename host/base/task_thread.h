#pragma once

#include <functional>
#include <thread>

#include "absl/base/thread_annotations.h"
#include "host/base/mutex.h"

namespace spillway {

// A thread that runs one task at a time, beside the thread that uses this object. Start() and
// Wait() are for one thread at a time. What is written before Start() is seen by the task, and what
// the task writes is seen after Wait().
class TaskThread {
 public:
  TaskThread() = default;
  // As Cancel().
  ~TaskThread();
  TaskThread(const TaskThread&) = delete;
  TaskThread& operator=(const TaskThread&) = delete;

  // Lets the thread run the task, and returns. The first call creates the thread; if there can be
  // none, Wait() runs the task. The task must not throw. REQUIRES: Wait() or Cancel() was called
  // since the last Start().
  void Start(std::function<void()> task) ABSL_LOCKS_EXCLUDED(mutex_);
  // Returns when the task has ended. Runs it in this thread if the other one has not begun yet.
  void Wait() ABSL_LOCKS_EXCLUDED(mutex_);
  // The same, but a task that has not begun is dropped.
  void Cancel() ABSL_LOCKS_EXCLUDED(mutex_);

 private:
  void Run() ABSL_LOCKS_EXCLUDED(mutex_);

  Mutex mutex_;
  CondVar changed_;
  std::function<void()> task_ ABSL_GUARDED_BY(mutex_);  // that has not begun
  bool running_ ABSL_GUARDED_BY(mutex_) = false;
  bool stopping_ ABSL_GUARDED_BY(mutex_) = false;
  std::thread thread_;
};

}  // namespace spillway
