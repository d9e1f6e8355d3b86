#include "services/append_stream.h"

#include <utility>

#include "absl/strings/str_cat.h"
#include "engine/errors.h"
#include "host/base/status_macros.h"
#include "services/convert/attend.h"
#include "services/convert/lookup.h"

namespace spillway {

AppendStream::AppendStream(const ServiceContext& services,
                           const grpc::CallbackServerContext& context, Caller caller,
                           v1::AppendResponse* response)
    : services_(services),
      caller_(std::move(caller)),
      response_(response),
      cancel_(MakeCancelToken(context)),
      idle_(services.limits.stream_idle_max()) {
  if (absl::Status status = services_.streams.Add(this); !status.ok()) {
    Finish(services_.status.ToGrpc(status, caller_.trace()));
  } else {
    StartRead(&read_);
  }
}

void AppendStream::OnDone() {
  services_.streams.Remove(this);
  delete this;
}

void AppendStream::CheckIdle(Clock::time_point now) {
  Step step;
  {
    const MutexLock lock(mutex_);
    if (appending_ || ended_ || !status_.ok()) return;
    status_ = idle_.Check(now);
    step = Next();
  }
  Do(step);
}

absl::StatusOr<AppendRequest> AppendStream::Parse(const v1::AppendRequest& request) {
  const v1::KvChunk& chunk = request.chunk();
  ASSIGN_OR_RETURN(std::shared_ptr<Sequence> sequence,
                   FindSequence(services_.engine, caller_, chunk.sequence(), "chunk.sequence"));
  ASSIGN_OR_RETURN(Chunk rows, ChunkFromProto(chunk, sequence->model->spec,
                                              CallerRegions(services_.regions, caller_)));
  return AppendRequest{std::move(sequence), std::move(rows), cancel_};
}

absl::Status AppendStream::WithProgress(const absl::Status& status) const {
  const int64_t appended = response_->appended_chunk_count();
  const int64_t present = response_->already_present_chunk_count();
  return WithMetadata(
      WithMessage(status,
                  absl::StrCat("message ", appended + present + 1,
                               " of the stream: ", status.message(), "; before it ", appended,
                               " chunks were appended and ", present, " were there already")),
      {{"appended_chunk_count", absl::StrCat(appended)},
       {"already_present_chunk_count", absl::StrCat(present)}});
}

void AppendStream::OnReadDone(bool ok) {
  absl::StatusOr<MemoryReservation> reservation;
  if (ok) reservation = ChargeMessage(read_, services_.engine.budget());
  Step step;
  {
    const MutexLock lock(mutex_);
    idle_.Renew();
    if (!ok) {
      ended_ = true;
    } else if (!reservation.ok()) {
      // The messages before this one are still appended.
      read_.Clear();
      ended_ = true;
      refused_ = reservation.status();
    } else {
      read_reservation_ = *std::move(reservation);
      waiting_ = true;
    }
    step = Next();
  }
  Do(step);
}

AppendStream::Step AppendStream::Next() {
  if (appending_ || finished_) return Step::kNothing;
  if (status_.ok() && waiting_) {
    std::swap(read_, current_);
    // request_ keeps the memory of the largest message so far, so keep the larger reservation.
    if (read_reservation_.bytes() > reservation_.bytes())
      std::swap(read_reservation_, reservation_);
    read_reservation_.Release();
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
      status = status_.ok() && !refused_.ok() ? WithProgress(refused_) : status_;
    }
    return Finish(services_.status.ToGrpc(status, caller_.trace()));
  }
  StartRead(&read_);
  const absl::Status parsed = ParseMessage(current_, request_);
  if (!parsed.ok()) return OnAppended(WithProgress(parsed));
  absl::StatusOr<AppendRequest> request = Parse(request_);
  if (!request.ok()) return OnAppended(request.status());
  services_.engine.Append(*std::move(request), [this](absl::StatusOr<AppendOutcome> outcome) {
    OnAppended(std::move(outcome));
  });
}

void AppendStream::OnAppended(absl::StatusOr<AppendOutcome> outcome) {
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
    idle_.Renew();
    if (status_.ok()) status_ = outcome.status();
    // If the next message is waiting, it reuses this memory.
    if (!waiting_ || !status_.ok()) {
      request_ = v1::AppendRequest();
      reservation_.Release();
    }
    step = Next();
  }
  Do(step);
}

}  // namespace spillway
