#include "engine/attend_operation.h"

#include <algorithm>
#include <string>
#include <utility>

#include "absl/strings/str_cat.h"
#include "engine/checks.h"
#include "engine/errors.h"
#include "host/base/status_macros.h"
#include "host/device/job_queue.h"

namespace spillway {
namespace {

// The same error, with the item's index in the message.
absl::Status AtItem(const absl::Status& status, size_t index) {
  return WithMessage(status, absl::StrCat("items[", index, "]: ", status.message()));
}

}  // namespace

void Engine::Attend(AttendRequest request, Done<AttendOutcome> done) {
  std::vector<OrderedQueues::Queue*> queues;
  queues.reserve(request.items.size());
  for (const AttendItem& item : request.items) {
    if (item.sequence->held) return done(SequenceHeld(item.sequence->name));
    queues.push_back(&item.sequence->queue);
  }
  queues_.Enqueue(queues,
                  std::make_shared<AttendOperation>(this, std::move(request), std::move(done)));
}

absl::Status Engine::AttendOperation::CheckItem(AttendItem& item) {
  Sequence& sequence = *item.sequence;
  RETURN_IF_ERROR(item.append ? sequence.CheckOpen() : sequence.Check());
  const LayerRows& rows = RowsOf(item);
  int64_t length = rows.token_count();
  if (item.append) {
    RETURN_IF_ERROR(CheckGeneration(item.append->generation, sequence));
    ASSIGN_OR_RETURN(const bool append, IsAppend(*item.append, 0, rows));
    if (append) {
      length += item.append->count;
    } else {
      item.append.reset();
    }
  }
  if (item.attend.query_count > kSparseQueryCountMax) item.attend.policy.selector = Selector::kAll;
  return ResolveVisible(length, item.attend);
}

absl::Status Engine::AttendOperation::Check() {
  if (request_.cancel != nullptr) {
    RETURN_IF_ERROR(request_.cancel->Check());
  }
  for (size_t i = 0; i < request_.items.size(); ++i) {
    absl::Status status = CheckItem(request_.items[i]);
    if (!status.ok()) return request_.items.size() == 1 ? status : AtItem(status, i);
  }
  return absl::OkStatus();
}

absl::Status Engine::AttendOperation::Prepare() {
  for (size_t i = 0; i < request_.items.size(); ++i) {
    AttendItem& item = request_.items[i];
    if (!item.append) continue;
    absl::Status status =
        engine_->PrepareAppend(*item.sequence, {&request_.layer, 1}, item.append->count);
    if (status.ok()) continue;
    for (size_t j = 0; j < i; ++j) {
      if (!request_.items[j].append) continue;
      Sequence& other = *request_.items[j].sequence;
      engine_->UndoPrepare(other, {&request_.layer, 1});
      other.Publish();  // its account was charged
    }
    return request_.items.size() == 1 ? status : AtItem(status, i);
  }
  return absl::OkStatus();
}

void Engine::AttendOperation::Start() {
  begun_ = Clock::now();
  engine_->counters_.attend_wait.Note(std::chrono::duration<double>(begun_ - asked_).count());
  if (absl::Status status = Check(); !status.ok()) return End(std::move(status));
  if (absl::Status status = Prepare(); !status.ok()) return End(std::move(status));
  Submit();
}

void Engine::AttendOperation::Submit() {
  auto job = std::make_unique<Job>();
  job->model = request_.items.front().sequence->model->device();
  job->layer = request_.layer;
  job->owner = request_.items.front().sequence->account->number;
  job->cancel = request_.cancel;
  job->waited_for = request_.waited_for;
  job->items.reserve(request_.items.size());
  for (AttendItem& item : request_.items) {
    JobItem& job_item = job->items.emplace_back();
    job_item.sequence = item.sequence->device.get();
    if (item.append) {
      const Chunk& chunk = *item.append;
      job_item.append = AppendWork{&RowsOf(item),    chunk.start,      chunk.count,
                                   chunk.k.Layer(0), chunk.v.Layer(0), chunk.shared_source};
    }
    if (Auditor* const auditor = engine_->options_.auditor;
        auditor != nullptr && auditor->enabled()) {
      Audited& audited = audited_.emplace_back();
      audited.policy = item.attend.policy;
      audited.levels = auditor->Strengthen(*item.sequence->model, request_.layer, item.attend);
      item.attend.audited = true;
    }
    item.attend.rows = &RowsOf(item);
    item.attend.select_only = request_.select_only;
    job_item.attend = std::move(item.attend);
  }
  engine_->device_->Submit(std::move(job),
                           [this](std::unique_ptr<Job> done) { OnJobDone(std::move(done)); });
}

void Engine::AttendOperation::Settle(AttendItem& item, const Job& job, const JobItem& done) {
  Sequence& sequence = *item.sequence;
  LayerRows& rows = RowsOf(item);
  if (item.append) {
    if (done.status.ok()) {
      rows.Keep(rows.token_count());
      engine_->CountAppend(sequence, item.append->count * rows.kv_head_count());
    } else {
      // The device drops its codes of these rows in the layer's next PrepareAppend().
      rows.Truncate(std::min(rows.token_count(), item.append->start));
    }
    sequence.Publish();
  }
  engine_->NoteEnded(sequence, done.status);
  if (done.status.ok() && !request_.select_only) engine_->CountAttend(job, done, sequence);
  engine_->Renew(sequence);
}

void Engine::AttendOperation::OnJobDone(std::unique_ptr<Job> job) {
  AttendOutcome outcome;
  for (size_t i = 0; i < request_.items.size(); ++i) {
    if (!audited_.empty() && job->items[i].status.ok()) {
      engine_->options_.auditor->Offer(request_.items[i].sequence->model, request_.layer,
                                       audited_[i].policy, audited_[i].levels, job->items[i]);
    }
    Settle(request_.items[i], *job, job->items[i]);
  }
  NoteTimes(*job);
  outcome.job = std::move(job);
  End(std::move(outcome));
}

void Engine::AttendOperation::NoteTimes(const Job& job) {
  const double seconds = std::chrono::duration<double>(Clock::now() - asked_).count();
  EngineCounters& counters = engine_->counters_;
  counters.attend_device.Note(job.device_time_us / 1e6);
  counters.attend_stages.Note(job.stages);
  counters.attend.Note(seconds);
  if (!engine_->slow_attends_.IsSlow(seconds)) return;
  size_t longest = 0;
  const auto visible = [&](size_t i) { return job.items[i].attend->visible.back(); };
  for (size_t i = 1; i < job.items.size(); ++i) {
    if (visible(i) > visible(longest)) longest = i;
  }
  const Sequence& sequence = *request_.items[longest].sequence;
  engine_->slow_attends_.Add(
      {.sequence = sequence.name,
       .sequence_count = static_cast<int>(job.items.size()),
       .model = sequence.model->name,
       .layer = request_.layer,
       .token_count = visible(longest),
       .query_count = job.items[longest].attend->query_count,
       .seconds = seconds,
       .wait_seconds = std::chrono::duration<double>(begun_ - asked_).count(),
       .queue_seconds = job.queue_time_us / 1e6,
       .device_seconds = job.device_time_us / 1e6,
       .stages = job.stages,
       .trace = request_.trace},
      KindOf(job) == JobKind::kStep);
}

void Engine::AttendOperation::End(absl::StatusOr<AttendOutcome> outcome) {
  done_(std::move(outcome));
  engine_->queues_.Finish(*this);
}

}  // namespace spillway
