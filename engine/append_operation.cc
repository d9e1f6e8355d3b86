#include "engine/append_operation.h"

#include <algorithm>
#include <utility>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "engine/checks.h"
#include "engine/errors.h"
#include "host/base/status_macros.h"

namespace spillway {
namespace {

// Layers of a chunk that are on the device at the same time.
constexpr size_t kLayersAtOnce = 2;

}  // namespace

void Engine::Append(AppendRequest request, Done<AppendOutcome> done) {
  if (request.sequence->held) return done(SequenceHeld(request.sequence->name));
  OrderedQueues::Queue* const queue = &request.sequence->queue;
  queues_.Enqueue({&queue, 1},
                  std::make_shared<AppendOperation>(this, std::move(request), std::move(done)));
}

absl::Status Engine::AppendOperation::Check() {
  Sequence& sequence = *request_.sequence;
  const Chunk& chunk = request_.chunk;
  RETURN_IF_ERROR(sequence.CheckOpen());
  if (request_.cancel != nullptr) {
    RETURN_IF_ERROR(request_.cancel->Check());
  }
  RETURN_IF_ERROR(CheckGeneration(chunk.generation, sequence));
  if (chunk.gpu != nullptr) {
    RETURN_IF_ERROR(
        CheckHome(*chunk.gpu, engine_->device_->HomeOf(*sequence.device), sequence, "chunk.k"));
  }
  for (int i = 0; i < chunk.layer_count; ++i) {
    const int layer = chunk.layer_start + i;
    if (chunk.on_gpu && chunk.start < sequence.rows[layer].token_count()) {
      return absl::OutOfRangeError(
          absl::StrCat("layer ", layer, " has ", sequence.rows[layer].token_count(),
                       " tokens: rows in GPU memory can only follow them, and are not compared "
                       "with rows that are already there"));
    }
    const absl::StatusOr<bool> append = IsAppend(chunk, i, sequence.rows[layer]);
    if (!append.ok()) return append.status();
    if (*append) layers_.push_back(layer);
  }
  return engine_->PrepareAppend(sequence, layers_, chunk.count);
}

void Engine::AppendOperation::Start() {
  if (absl::Status status = Check(); !status.ok()) return End(std::move(status));
  if (layers_.empty()) return End(absl::OkStatus());
  // Two at a time: one layer is encoded while the rows of the other are copied.
  const size_t first = std::min<size_t>(layers_.size(), kLayersAtOnce);
  {
    const MutexLock lock(mutex_);
    running_ = next_ = first;
  }
  for (size_t i = 0; i < first; ++i) Submit(i);
}

void Engine::AppendOperation::Submit(size_t index) {
  Sequence& sequence = *request_.sequence;
  const Chunk& chunk = request_.chunk;
  const int layer = layers_[index];
  const int offset = layer - chunk.layer_start;
  auto job = std::make_unique<Job>();
  job->model = sequence.model->device();
  job->layer = layer;
  job->owner = sequence.account->number;
  // No cancel token: a chunk is appended as a whole or not at all.
  JobItem& item = job->items.emplace_back();
  item.sequence = sequence.device.get();
  // The memory of a GPU that is known is that of a region, which the client's process maps.
  item.append = AppendWork{.rows = &sequence.rows[layer],
                           .start = chunk.start,
                           .count = chunk.count,
                           .k = chunk.k.Layer(offset),
                           .v = chunk.v.Layer(offset),
                           .shared_source = chunk.shared_source,
                           .on_gpu = chunk.on_gpu,
                           .read_once = chunk.gpu != nullptr};
  engine_->device_->Submit(std::move(job),
                           [this](std::unique_ptr<Job> done) { OnJobDone(std::move(done)); });
}

void Engine::AppendOperation::OnJobDone(std::unique_ptr<Job> job) {
  absl::Status status = std::move(job->items.front().status);
  engine_->NoteEnded(*request_.sequence, status);
  if (status.ok()) {
    // Here, while the device appends the other layer: only rows from a GPU are not summed yet.
    LayerRows& rows = request_.sequence->rows[job->layer];
    rows.SumUpTo(rows.token_count());
  }
  if (request_.chunk.shared_source && absl::IsOutOfRange(status)) {
    status = NonFinite(status, absl::StartsWith(status.message(), "K ") ? "chunk.k" : "chunk.v");
  }
  size_t next = layers_.size();
  bool last = false;
  {
    const MutexLock lock(mutex_);
    // If several layers fail, the lowest one's error is kept, because its rows come first in the
    // chunk.
    if (!status.ok() && (status_.ok() || job->layer < failed_layer_)) {
      status_ = std::move(status);
      failed_layer_ = job->layer;
    }
    if (status_.ok() && next_ < layers_.size()) {
      next = next_++;
    } else {
      last = --running_ == 0;
    }
  }
  if (next < layers_.size()) RunStep([this, next] { Submit(next); });
  if (last) End();
}

void Engine::AppendOperation::End() {
  absl::Status status;
  {
    const MutexLock lock(mutex_);
    status = std::move(status_);
  }
  End(std::move(status));
}

void Engine::AppendOperation::End(absl::Status status) {
  Sequence& sequence = *request_.sequence;
  if (!sequence.deleted() && !layers_.empty()) {
    if (!status.ok()) {
      for (const int layer : layers_) {
        sequence.rows[layer].Truncate(
            std::min(sequence.rows[layer].token_count(), request_.chunk.start));
      }
    }
    for (const int layer : layers_) {
      sequence.rows[layer].Keep(sequence.rows[layer].token_count());
    }
    sequence.Publish();
  }
  engine_->Renew(sequence);
  if (status.ok()) {
    engine_->CountAppend(sequence, request_.chunk.count * sequence.model->spec.kv_head_count *
                                       static_cast<int64_t>(layers_.size()));
    AppendOutcome outcome;
    outcome.already_present = layers_.empty();
    outcome.layer_token_counts.reserve(sequence.rows.size());
    for (const LayerRows& rows : sequence.rows) {
      outcome.layer_token_counts.push_back(rows.token_count());
    }
    done_(std::move(outcome));
  } else {
    done_(std::move(status));
  }
  engine_->queues_.Finish(*this);
}

}  // namespace spillway
