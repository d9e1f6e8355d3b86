#include "daemon/engine/append_operation.h"

#include <utility>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "daemon/engine/checks.h"
#include "daemon/engine/errors.h"
#include "host/base/status_macros.h"

namespace spillway {

void Engine::Append(AppendRequest request, Done<AppendOutcome> done) {
  if (request.sequence->held) return done(SequenceHeld(request.sequence->name));
  OrderedQueues::Queue* const queue = &request.sequence->queue;
  queues_.Enqueue({&queue, 1},
                  std::make_shared<AppendOperation>(this, std::move(request), std::move(done)));
}

absl::Status Engine::AppendOperation::Check() {
  Sequence& sequence = *request_.sequence;
  const Chunk& chunk = request_.chunk;
  if (sequence.deleted()) return SequenceNotFound(sequence.name);
  if (request_.cancel != nullptr) {
    RETURN_IF_ERROR(request_.cancel->Check());
  }
  RETURN_IF_ERROR(CheckGeneration(chunk.generation, sequence));
  for (int i = 0; i < chunk.layer_count; ++i) {
    const int layer = chunk.layer_start + i;
    const absl::StatusOr<bool> append = IsAppend(chunk, i, sequence.rows[layer]);
    if (!append.ok()) return append.status();
    if (*append) layers_.push_back(layer);
  }
  return engine_->PrepareAppend(sequence, layers_, chunk.count);
}

void Engine::AppendOperation::Start() {
  if (absl::Status status = Check(); !status.ok()) return End(std::move(status));
  SubmitNext();
}

void Engine::AppendOperation::SubmitNext() {
  if (next_ == layers_.size()) return End(absl::OkStatus());
  Sequence& sequence = *request_.sequence;
  const Chunk& chunk = request_.chunk;
  const int layer = layers_[next_];
  const int offset = layer - chunk.layer_start;
  auto job = std::make_unique<Job>();
  job->model = sequence.model->device();
  job->layer = layer;
  // No cancellation: a chunk commits whole or not at all.
  JobItem& item = job->items.emplace_back();
  item.sequence = sequence.device.get();
  item.append = AppendWork{&sequence.rows[layer], chunk.start,           chunk.count,
                           chunk.k.Layer(offset), chunk.v.Layer(offset), chunk.shared_source};
  engine_->device_->Submit(std::move(job),
                           [this](std::unique_ptr<Job> done) { OnJobDone(std::move(done)); });
}

void Engine::AppendOperation::OnJobDone(std::unique_ptr<Job> job) {
  absl::Status status = std::move(job->items.front().status);
  if (!status.ok()) {
    if (request_.chunk.shared_source && absl::IsOutOfRange(status)) {
      status = NonFinite(status, absl::StartsWith(status.message(), "K ") ? "chunk.k" : "chunk.v");
    }
    return End(std::move(status));
  }
  ++next_;
  RunStep([this] { SubmitNext(); });
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
