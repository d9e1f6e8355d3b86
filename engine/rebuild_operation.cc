#include "engine/rebuild_operation.h"

#include <algorithm>
#include <utility>

#include "engine/errors.h"
#include "host/base/status_macros.h"

namespace spillway {
namespace {

// Sequences that are rebuilt at the same time, and layers of each: a device encodes one layer while
// the rows of the next one arrive.
constexpr int kSequencesAtOnce = 4;
constexpr size_t kRebuiltAtOnce = 2;
// Tokens of one job. Stop() waits until the running jobs have ended.
constexpr int64_t kTokensAtOnce = 64 << 10;

absl::Status Stopping(const Sequence& sequence) {
  return WithReason(
      absl::UnavailableError(sequence.name + " was not served yet, and the engine stops"),
      Reason::kStopping);
}

}  // namespace

void Engine::Rebuilder::Expect(int64_t count, int64_t lost_count, int64_t damaged_count) {
  const MutexLock lock(mutex_);
  progress_.sequence_count += count;
  progress_.lost_count += lost_count;
  progress_.damaged_count += damaged_count;
}

void Engine::Rebuilder::Add(RebuildOperation* operation) {
  {
    const MutexLock lock(mutex_);
    if (running_ >= kSequencesAtOnce) {
      waiting_.push_back(operation);
      return;
    }
    ++running_;
  }
  operation->Run();
}

void Engine::Rebuilder::Ended(bool ok) {
  RebuildOperation* next = nullptr;
  {
    const MutexLock lock(mutex_);
    ++(ok ? progress_.done_count : progress_.failed_count);
    if (!waiting_.empty()) {
      next = waiting_.front();
      waiting_.pop_front();
    } else {
      --running_;
    }
    // Under the lock: the thread that waits may destroy this as soon as the lock is released.
    if (progress_.done_count + progress_.failed_count == progress_.sequence_count) {
      ended_.NotifyAll();
    }
  }
  if (next != nullptr) RunStep([next] { next->Run(); });
}

void Engine::Rebuilder::CountRows(int64_t bytes) {
  const MutexLock lock(mutex_);
  progress_.row_bytes += bytes;
}

bool Engine::Rebuilder::stopping() const {
  const MutexLock lock(mutex_);
  return stopping_;
}

void Engine::Rebuilder::Stop() {
  MutexLock lock(mutex_);
  // Those that wait still run, and end as soon as they see this.
  stopping_ = true;
  while (progress_.done_count + progress_.failed_count < progress_.sequence_count) {
    ended_.Wait(mutex_);
  }
}

RebuildProgress Engine::Rebuilder::progress() const {
  const MutexLock lock(mutex_);
  return progress_;
}

RebuildProgress Engine::rebuild_progress() const { return rebuilder_->progress(); }

void Engine::StopRebuilding() { rebuilder_->Stop(); }

void Engine::ShareCodesOperation::Start() {
  if (source_->failure.ok()) {
    absl::StatusOr<std::unique_ptr<DeviceSequence>> copy =
        engine_->device_->ForkSequence(*sequence_->model->device(), *source_->device, token_count_);
    if (copy.ok()) {
      sequence_->device = *std::move(copy);
      for (LayerRows& layer : sequence_->rows) layer.Commit(token_count_);
    }
  }
  engine_->queues_.Finish(*this);
}

void Engine::RebuildOperation::Start() { engine_->rebuilder_->Add(this); }

absl::Status Engine::RebuildOperation::Prepare() {
  Sequence& sequence = *sequence_;
  for (const int layer : layers_) {
    const int64_t start = sequence.rows[layer].token_count();
    RETURN_IF_ERROR(
        engine_->device_->PrepareAppend(*sequence.model->device(), *sequence.device, layer, start,
                                        sequence.record->layer(layer).token_count() - start));
  }
  return sequence.ReserveTables(*engine_->budget_);
}

void Engine::RebuildOperation::Run() {
  for (int layer = 0; layer < sequence_->record->layer_count(); ++layer) {
    // The codes of its first rows may have been taken over (ShareCodesOperation).
    if (sequence_->record->layer(layer).token_count() > sequence_->rows[layer].token_count()) {
      layers_.push_back(layer);
    }
  }
  if (engine_->rebuilder_->stopping()) return End(Stopping(*sequence_));
  if (absl::Status status = Prepare(); !status.ok()) return End(std::move(status));
  if (layers_.empty()) return End(absl::OkStatus());
  const size_t first = std::min(layers_.size(), kRebuiltAtOnce);
  {
    const MutexLock lock(mutex_);
    running_ = next_ = first;
  }
  for (size_t i = 0; i < first; ++i) Submit(i);
}

void Engine::RebuildOperation::Submit(size_t index) {
  const int layer = layers_[index];
  LayerRows& rows = sequence_->rows[layer];
  const int64_t start = rows.token_count();
  const int64_t end = sequence_->record->layer(layer).token_count();
  auto job = std::make_unique<Job>();
  job->model = sequence_->model->device();
  job->layer = layer;
  JobItem& item = job->items.emplace_back();
  item.sequence = sequence_->device.get();
  AppendWork& work = item.append.emplace();
  work.rows = &rows;
  work.start = start;
  work.count = std::min(kTokensAtOnce, end - start);
  work.rows_present = true;
  engine_->device_->Submit(std::move(job),
                           [this, index](std::unique_ptr<Job> done) { OnJobDone(index, *done); });
}

void Engine::RebuildOperation::OnJobDone(size_t index, const Job& job) {
  const int layer = layers_[index];
  const LayerRows& rows = sequence_->rows[layer];
  engine_->rebuilder_->CountRows(job.items.front().append->count * rows.kv_head_count() *
                                 rows.row_bytes());
  absl::Status status = job.items.front().status;
  if (status.ok() && engine_->rebuilder_->stopping()) status = Stopping(*sequence_);
  size_t next = layers_.size();
  absl::Status ended;
  {
    const MutexLock lock(mutex_);
    status_.Update(status);
    if (status_.ok() && rows.token_count() < sequence_->record->layer(layer).token_count()) {
      next = index;
    } else if (status_.ok() && next_ < layers_.size()) {
      next = next_++;
    } else if (--running_ > 0) {
      return;
    }
    ended = status_;
  }
  if (next < layers_.size()) return RunStep([this, next] { Submit(next); });
  End(std::move(ended));
}

void Engine::RebuildOperation::End(absl::Status status) {
  Sequence& sequence = *sequence_;
  Engine* const engine = engine_;
  for (int layer = 0; layer < sequence.record->layer_count() && status.ok(); ++layer) {
    LayerRecord& record = sequence.record->layer(layer);
    status = sequence.rows[layer].Record(&record, &record);
  }
  const bool ok = status.ok();
  if (ok) {
    sequence.Publish();
  } else {
    engine->device_->TruncateSequence(*sequence.model->device(), *sequence.device, 0);
    sequence.failure = WithMessage(
        status, sequence.name + " is kept but cannot be served: " + std::string(status.message()));
  }
  engine->Renew(sequence);
  rebuilt_(sequence, status);
  engine->queues_.Finish(*this);
  engine->rebuilder_->Ended(ok);
}

}  // namespace spillway
