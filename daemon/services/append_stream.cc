#include "daemon/services/append_stream.h"

#include <utility>

#include "daemon/convert/attend.h"
#include "daemon/convert/lookup.h"
#include "daemon/engine/errors.h"
#include "host/base/status_macros.h"

namespace spillway {

AppendStream::AppendStream(const ServiceContext& services,
                           const grpc::CallbackServerContext& context, v1::AppendResponse* response)
    : services_(services), response_(response), cancel_(MakeCancelToken(context)) {
  StartRead(&read_);
}

absl::StatusOr<AppendRequest> AppendStream::Parse(const v1::AppendRequest& request) {
  const v1::KvChunk& chunk = request.chunk();
  ASSIGN_OR_RETURN(std::shared_ptr<Sequence> sequence,
                   FindSequence(services_.engine, chunk.sequence(), "chunk.sequence"));
  ASSIGN_OR_RETURN(Chunk rows, ChunkFromProto(chunk, sequence->model->spec, services_.regions));
  ASSIGN_OR_RETURN(reservation_,
                   services_.engine.budget().Reserve(
                       static_cast<int64_t>(chunk.k().data().size() + chunk.v().data().size()),
                       "a request", MemoryUse::kMessages));
  return AppendRequest{std::move(sequence), std::move(rows), cancel_};
}

void AppendStream::OnReadDone(bool ok) {
  Step step;
  {
    const MutexLock lock(mutex_);
    if (ok) {
      waiting_ = true;
    } else {
      ended_ = true;
    }
    step = Next();
  }
  Do(step);
}

AppendStream::Step AppendStream::Next() {
  if (appending_ || finished_) return Step::kNothing;
  if (status_.ok() && waiting_) {
    std::swap(read_, current_);
    waiting_ = false;
    appending_ = true;
    return Step::kAppend;
  }
  if (status_.ok() && !ended_) return Step::kNothing;
  finished_ = true;
  return Step::kFinish;
}

void AppendStream::Do(Step step) {
  if (step == Step::kNothing) return;
  if (step == Step::kFinish) {
    absl::Status status;
    {
      const MutexLock lock(mutex_);
      status = status_;
    }
    return Finish(services_.status.ToGrpc(status));
  }
  StartRead(&read_);
  absl::StatusOr<AppendRequest> request = Parse(current_);
  if (!request.ok()) return OnAppended(request.status());
  services_.engine.Append(*std::move(request), [this](absl::StatusOr<AppendOutcome> outcome) {
    OnAppended(std::move(outcome));
  });
}

void AppendStream::OnAppended(absl::StatusOr<AppendOutcome> outcome) {
  reservation_.Release();
  if (outcome.ok()) {
    if (outcome->already_present) {
      response_->set_already_present_chunk_count(response_->already_present_chunk_count() + 1);
    } else {
      response_->set_appended_chunk_count(response_->appended_chunk_count() + 1);
    }
    auto& counts = *response_->mutable_layer_token_counts();
    counts.Clear();
    counts.Add(outcome->layer_token_counts.begin(), outcome->layer_token_counts.end());
  }
  Step step;
  {
    const MutexLock lock(mutex_);
    appending_ = false;
    if (status_.ok()) status_ = outcome.status();
    step = Next();
  }
  Do(step);
}

}  // namespace spillway
