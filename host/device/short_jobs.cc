#include "host/device/short_jobs.h"

#include <chrono>
#include <thread>
#include <utility>
#include <vector>

#include "host/base/parallel.h"
#include "host/device/help_credit.h"

namespace spillway {
namespace {

// Lets the system run threads that wait for this worker's core, unless this happened a moment ago.
// A device has one worker per core, and callers' threads come on top. Without this, a caller that
// computes a step would wait for the end of a worker's time slice, which is as long as several
// steps.
void GiveWay() {
  using Clock = std::chrono::steady_clock;
  constexpr Clock::duration kBetween = std::chrono::microseconds(200);
  thread_local Clock::time_point next;
  const Clock::time_point now = Clock::now();
  if (now < next) return;
  std::this_thread::yield();
  next = now + kBetween;
}

}  // namespace

void ShortJobs::Push(Waiting job) {
  const MutexLock lock(mutex_);
  AddWork(job.work);
  waiting_.push_back(std::move(job));
}

void ShortJobs::RunNext() {
  std::optional<Waiting> job;
  {
    const MutexLock lock(mutex_);
    job = Take(std::numeric_limits<int64_t>::max());
  }
  if (job.has_value()) job->run();
}

void ShortJobs::Loop(int64_t work, int64_t count, const std::function<void(int64_t)>& f) {
  // A loop that stays in one thread is over before another thread could help.
  if (count < 2 || SerialScope::active()) return ParallelFor(int64_t{0}, count, f);
  OpenLoop loop;
  loop.work = work;
  loop.count = count;
  loop.f = &f;
  {
    const MutexLock lock(mutex_);
    AddWork(work);
    loops_.push_back(&loop);
  }
  ParallelFor(int64_t{0}, count, [&](int64_t) {
    const int64_t i = loop.next.fetch_add(1, std::memory_order_relaxed);
    if (i < count) f(i);
  });
  const MutexLock lock(mutex_);
  Unlist(loop);
  while (loop.helper_count > 0) loop.helped.Wait(mutex_);
}

void ShortJobs::Pause(int64_t work) {
  if (paused_) return;
  if (!callers_) GiveWay();
  if (least_work_.load(std::memory_order_relaxed) > work / kShare) return;
  thread_local HelpCredit credit;
  while (credit.MayHelp(std::chrono::steady_clock::now())) {
    if (!Help(work)) return;
    credit.Spent(std::chrono::steady_clock::now());
  }
}

bool ShortJobs::Help(int64_t work) {
  int64_t index = 0;
  OpenLoop* loop = nullptr;
  std::optional<Waiting> job;
  {
    const MutexLock lock(mutex_);
    loop = Claim(work / kShare, index);
    if (loop == nullptr && !callers_) job = Take(work / kShare);
  }
  if (loop == nullptr && !job.has_value()) return false;
  paused_ = true;
  if (loop != nullptr) {
    const SerialScope serial;
    (*loop->f)(index);
  } else {
    job->run();
  }
  paused_ = false;
  if (loop != nullptr) {
    const MutexLock lock(mutex_);
    // Under the lock: the loop is destroyed as soon as its thread sees this.
    if (--loop->helper_count == 0) loop->helped.NotifyOne();
  }
  return true;
}

ShortJobs::OpenLoop* ShortJobs::Claim(int64_t work_max, int64_t& index) {
  for (auto at = loops_.begin(); at != loops_.end();) {
    OpenLoop& loop = **at++;
    if (loop.work > work_max) continue;
    index = loop.next.fetch_add(1, std::memory_order_relaxed);
    if (index < loop.count) {
      ++loop.helper_count;
      return &loop;
    }
    Unlist(loop);
  }
  return nullptr;
}

std::optional<ShortJobs::Waiting> ShortJobs::Take(int64_t work_max) {
  std::vector<std::list<Waiting>::iterator> fit;
  for (auto at = waiting_.begin(); at != waiting_.end(); ++at) {
    if (at->work <= work_max) fit.push_back(at);
  }
  if (fit.empty()) return std::nullopt;
  const auto at = *order_.Next(fit, [](const auto& waiting) { return waiting->owner; });
  std::optional<Waiting> job = std::move(*at);
  RemoveWork(job->work);
  waiting_.erase(at);
  return job;
}

void ShortJobs::Unlist(OpenLoop& loop) {
  if (!loop.listed) return;
  loop.listed = false;
  loops_.remove(&loop);
  RemoveWork(loop.work);
}

void ShortJobs::AddWork(int64_t work) {
  works_.insert(work);
  least_work_.store(*works_.begin(), std::memory_order_relaxed);
}

void ShortJobs::RemoveWork(int64_t work) {
  works_.erase(works_.find(work));
  least_work_.store(works_.empty() ? std::numeric_limits<int64_t>::max() : *works_.begin(),
                    std::memory_order_relaxed);
}

}  // namespace spillway
