#include "host/device/job_queue.h"

#include <algorithm>
#include <cassert>
#include <iterator>
#include <utility>

#include "host/base/limits.h"

namespace spillway {
namespace {

// Cancelled once every part is cancelled or late.
class BatchCancelToken final : public CancelToken {
 public:
  explicit BatchCancelToken(const std::vector<QueuedJob>& parts) {
    for (const QueuedJob& part : parts) tokens_.push_back(part.job->cancel);
  }
  bool cancelled() const override {
    return std::all_of(tokens_.begin(), tokens_.end(),
                       [](const auto& token) { return token != nullptr && !token->Check().ok(); });
  }

 private:
  std::vector<std::shared_ptr<CancelToken>> tokens_;
};

// A job that is already cancelled is not joined; it ends by itself.
bool MayJoin(const QueuedJob& queued) {
  const Job& job = *queued.job;
  return !queued.alone && !job.trace && (job.cancel == nullptr || job.cancel->Check().ok());
}

}  // namespace

JobKind KindOf(const Job& job) {
  const bool step = std::all_of(job.items.begin(), job.items.end(), [](const JobItem& item) {
    return item.attend && !item.attend->select_only &&
           item.attend->query_count <= kSparseQueryCountMax &&
           (!item.append || item.append->count <= item.attend->query_count);
  });
  return step ? JobKind::kStep : JobKind::kLong;
}

JobBatch::JobBatch(std::vector<QueuedJob> parts) : parts_(std::move(parts)) {
  assert(!parts_.empty());
  if (parts_.size() == 1) return;
  joined_ = std::make_unique<Job>();
  joined_->model = parts_.front().job->model;
  joined_->layer = parts_.front().job->layer;
  joined_->owner = parts_.front().job->owner;
  joined_->cancel = std::make_shared<BatchCancelToken>(parts_);
  for (QueuedJob& part : parts_) {
    assert(part.job->model == joined_->model && part.job->layer == joined_->layer);
    std::move(part.job->items.begin(), part.job->items.end(), std::back_inserter(joined_->items));
  }
}

void JobBatch::Begin() {
  const auto now = std::chrono::steady_clock::now();
  for (QueuedJob& part : parts_) {
    part.job->queue_time_us =
        std::chrono::duration<double, std::micro>(now - part.submitted).count();
  }
}

std::vector<QueuedJob> JobBatch::Split() {
  if (joined_ != nullptr) {
    auto item = joined_->items.begin();
    const auto item_count = static_cast<int64_t>(joined_->items.size());
    for (QueuedJob& part : parts_) {
      for (JobItem& own : part.job->items) {
        own = std::move(*item++);
        if (!absl::IsCancelled(own.status) || part.job->cancel == nullptr) continue;
        // The batch stops when all of its parts do, and each part has a reason of its own.
        if (absl::Status reason = part.job->cancel->Check(); !reason.ok()) own.status = reason;
      }
      part.job->device_time_us = joined_->device_time_us;
      part.job->batch_item_count = item_count;
      part.job->stages = joined_->stages;
    }
    joined_.reset();
  }
  return std::move(parts_);
}

void JobQueue::Push(QueuedJob job) { Waiting(KindOf(*job.job)).push_back(std::move(job)); }

void JobQueue::PutBack(std::vector<QueuedJob> jobs) {
  for (auto job = jobs.rbegin(); job != jobs.rend(); ++job) {
    job->alone = true;
    Waiting(KindOf(*job->job)).push_front(std::move(*job));
  }
}

std::optional<JobBatch> JobQueue::Take(JobKind kind) {
  std::list<QueuedJob>& waiting = Waiting(kind);
  if (waiting.empty()) return std::nullopt;
  std::vector<QueuedJob> parts;
  const auto next = order_[static_cast<int>(kind)].Next(
      waiting, [](const QueuedJob& queued) { return queued.job->owner; });
  parts.push_back(std::move(*next));
  waiting.erase(next);
  if (kind == JobKind::kStep && MayJoin(parts.front())) {
    const Job& first = *parts.front().job;
    size_t items = first.items.size();
    for (auto at = waiting.begin(); at != waiting.end();) {
      const auto next = std::next(at);
      const Job& job = *at->job;
      if (job.model == first.model && job.layer == first.layer && MayJoin(*at) &&
          items + job.items.size() <= kBatchItemsMax) {
        items += job.items.size();
        parts.push_back(std::move(*at));
        waiting.erase(at);
      }
      at = next;
    }
  }
  return JobBatch(std::move(parts));
}

}  // namespace spillway
