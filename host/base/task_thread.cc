#include "host/base/task_thread.h"

#include <exception>
#include <utility>

namespace spillway {

TaskThread::~TaskThread() {
  Cancel();
  {
    const MutexLock lock(mutex_);
    stopping_ = true;
  }
  changed_.NotifyAll();
  if (thread_.joinable()) thread_.join();
}

void TaskThread::Start(std::function<void()> task) {
  if (!thread_.joinable()) {
    try {
      thread_ = std::thread([this] { Run(); });
    } catch (const std::exception&) {
      // The process may have no more threads, or no memory.
    }
  }
  {
    const MutexLock lock(mutex_);
    task_ = std::move(task);
  }
  changed_.NotifyAll();
}

void TaskThread::Wait() {
  MutexLock lock(mutex_);
  if (std::function<void()> own = std::exchange(task_, nullptr); own != nullptr) {
    lock.Unlock();
    own();
    lock.Lock();
  }
  while (running_) changed_.Wait(mutex_);
}

void TaskThread::Cancel() {
  MutexLock lock(mutex_);
  task_ = nullptr;
  while (running_) changed_.Wait(mutex_);
}

void TaskThread::Run() {
  MutexLock lock(mutex_);
  while (true) {
    while (task_ == nullptr && !stopping_) changed_.Wait(mutex_);
    if (task_ == nullptr) return;
    {
      const std::function<void()> task = std::exchange(task_, nullptr);
      running_ = true;
      lock.Unlock();
      task();
    }
    lock.Lock();
    running_ = false;
    changed_.NotifyAll();
  }
}

}  // namespace spillway
