#include "daemon/services/decode_call.h"

#include "absl/strings/str_cat.h"
#include "daemon/convert/attend.h"
#include "daemon/convert/lookup.h"
#include "daemon/convert/trace.h"
#include "daemon/engine/errors.h"
#include "daemon/services/attend_call.h"
#include "host/base/status_macros.h"

namespace spillway {
namespace {

// A message is kept for reuse only if it and its answer are at most this large.
constexpr int64_t kSpareBytesMax = 64 << 10;
// Valid names of sequences are shorter.
constexpr size_t kNameBytesMax = 128;
// Memory charged for a blocked layer.
constexpr int64_t kBlockedBytes = 256;

}  // namespace

void DecodeCall::Message::Clear() {
  request.Clear();
  response.Clear();
  request_reservation.Release();
  result_reservation.Release();
  places = ResultPlaces();
  trace.clear();
  answered = false;
}

void DecodeCall::Message::DropContents() {
  v1::DecodeRequest rest;
  rest.set_sequence(request.sequence().substr(0, kNameBytesMax));
  rest.set_layer(request.layer());
  request = std::move(rest);
  places = ResultPlaces();
  request_reservation.Release();
  result_reservation.Release();
}

DecodeCall::DecodeCall(const ServiceContext& services, const grpc::CallbackServerContext& context,
                       Caller caller)
    : services_(services),
      caller_(std::move(caller)),
      cancel_(MakeCancelToken(context)),
      timer_(services.calls.Find("/spillway.v1.AttentionService/Decode")) {
  const absl::Status added = services_.streams.Add(this);
  Step step;
  {
    const MutexLock lock(mutex_);
    end_ = added;
    ended_ = !added.ok();
    step = Next();
  }
  Do(step);
}

void DecodeCall::OnDone() {
  services_.streams.Remove(this);
  delete this;
}

void DecodeCall::Drain() {
  Step step;
  {
    const MutexLock lock(mutex_);
    draining_ = true;
    step = Next();
  }
  Do(step);
}

DecodeCall::Step DecodeCall::Next() {
  Step step;
  if (finished_) return step;
  if (!write_active_ && !to_write_.empty()) {
    if (broken_) {
      message_count_ -= static_cast<int>(to_write_.size());
      to_write_.clear();
    } else {
      step.write = to_write_.front().get();
      write_active_ = true;
    }
  }
  const bool stop = ended_ || draining_ || broken_;
  if (!stop && !read_active_ && message_count_ < services_.limits.decode_in_flight_max()) {
    reading_ = spare_ != nullptr ? std::move(spare_) : std::make_unique<Message>();
    read_active_ = read_starting_ = step.read = true;
  }
  // A read that waits for the client does not delay a drain: it ends with the call.
  if (stop && message_count_ == 0 && !write_active_ && !read_starting_) {
    finished_ = step.finish = true;
    step.status = draining_ && !ended_ ? services_.drain.CheckNewWork() : end_;
  }
  return step;
}

void DecodeCall::Do(const Step& step) {
  // Writes before it reads. While a read is about to start, no other thread can end the call:
  // Next() does not finish as long as read_starting_ is set.
  if (step.write != nullptr) StartWrite(&step.write->response);
  if (step.read) {
    StartRead(&reading_->received);
    Step next;
    {
      const MutexLock lock(mutex_);
      read_starting_ = false;
      next = Next();
    }
    return Do(next);
  }
  if (!step.finish) return;
  timer_.End(static_cast<int>(step.status.code()));
  Finish(services_.status.ToGrpc(step.status, caller_.trace()));
}

absl::Status DecodeCall::Open(Message& message, absl::Status& refusal) {
  message.received_bytes = static_cast<int64_t>(message.received.Length());
  absl::StatusOr<MemoryReservation> reservation =
      ChargeMessage(message.received, services_.engine.budget());
  if (absl::Status status = ParseMessage(message.received, message.request); !status.ok()) {
    return WithMetadata(
        WithMessage(status,
                    absl::StrCat("message ", read_count_ + 1, " of the stream: ", status.message(),
                                 "; the ", read_count_, " messages before it were answered")),
        {{"message_count", absl::StrCat(read_count_)}});
  }
  ++read_count_;
  refusal = reservation.status();
  if (reservation.ok()) message.request_reservation = *std::move(reservation);
  message.response.set_correlation_id(message.request.correlation_id());
  return absl::OkStatus();
}

void DecodeCall::OnReadDone(bool ok) {
  absl::Status refusal;
  const absl::Status opened = ok ? Open(*reading_, refusal) : absl::OkStatus();
  Message* message = nullptr;
  Step step;
  {
    const MutexLock lock(mutex_);
    if (!ok || !opened.ok()) {
      ended_ = true;
      end_.Update(opened);
    } else if (!finished_) {
      message = reading_.get();
      in_flight_.push_back(std::move(reading_));
      ++message_count_;
    }
  }
  // The next message is read only when this one has its place in the queue of its sequence, even if
  // another thread calls Next() in between.
  if (message != nullptr) Serve(message, refusal);
  {
    const MutexLock lock(mutex_);
    read_active_ = false;
    step = Next();
  }
  Do(step);
}

void DecodeCall::OnWriteDone(bool ok) {
  Step step;
  {
    const MutexLock lock(mutex_);
    write_active_ = false;
    std::unique_ptr<Message> written = std::move(to_write_.front());
    to_write_.pop_front();
    if (spare_ == nullptr && !ended_ &&
        written->received_bytes + static_cast<int64_t>(written->response.ByteSizeLong()) <=
            kSpareBytesMax) {
      written->Clear();
      spare_ = std::move(written);
    }
    --message_count_;
    if (!ok) broken_ = true;
    step = Next();
  }
  Do(step);
}

absl::Status DecodeCall::CheckMessage(Message& message, AttendItem& item) {
  const v1::DecodeRequest& request = message.request;
  const ModelSpec& spec = item.sequence->model->spec;
  RETURN_IF_ERROR(CheckTraceId(request.trace_id()));
  RETURN_IF_ERROR(CheckLayer(request.layer(), spec));
  if (request.has_append()) {
    ASSIGN_OR_RETURN(item.append, ChunkFromProto(request.append(), request.layer(), spec,
                                                 CallerRegions(services_.regions, caller_)));
  }
  RETURN_IF_ERROR(QueryFromProto(request, CallerRegions(services_.regions, caller_), "", item));
  ASSIGN_OR_RETURN(message.places, PlacesFromProto(request, request.out_dtype(), item.attend, spec,
                                                   CallerRegions(services_.regions, caller_), ""));
  const int64_t bytes = ResultBytes(item.attend, spec, message.places);
  if (bytes > kMessageBytesMax) {
    return InvalidField("q.shape", absl::StrCat("the answer would take ", bytes,
                                                " bytes, more than ", kMessageBytesMax));
  }
  ASSIGN_OR_RETURN(message.result_reservation,
                   services_.engine.budget().Reserve(2 * bytes, "the answer to a request",
                                                     MemoryUse::kMessages));
  return absl::OkStatus();
}

absl::StatusOr<AttendItem> DecodeCall::Parse(Message& message, absl::Status& problem) {
  ASSIGN_OR_RETURN(std::shared_ptr<Sequence> sequence,
                   FindSequence(services_.engine, caller_, message.sequence(), "sequence"));
  AttendItem item;
  item.sequence = std::move(sequence);
  if (problem.ok()) problem = CheckMessage(message, item);
  if (!problem.ok()) {
    item.append.reset();
    item.attend = {};
    message.DropContents();
  }
  return item;
}

absl::Status DecodeCall::Admit(const Message& message, const absl::Status& problem,
                               int64_t layer_token_count) {
  if (!problem.ok()) return problem;
  const MutexLock lock(mutex_);
  if (blocked_.empty()) return absl::OkStatus();
  const auto blocked = blocked_.find(LayerKey(message.sequence(), message.request.layer()));
  if (blocked == blocked_.end()) return absl::OkStatus();
  if (message.request.has_append() && message.request.append().token_start() == layer_token_count) {
    blocked_.erase(blocked);
    blocked_reservation_.Split(kBlockedBytes);
    return absl::OkStatus();
  }
  return WithReason(
      absl::FailedPreconditionError(absl::StrCat(
          "an earlier message of ", message.sequence(), ", layer ", message.request.layer(),
          " failed; the next must append at token ", layer_token_count)),
      "DECODE_BLOCKED", {{"layer_token_count", absl::StrCat(layer_token_count)}});
}

void DecodeCall::Serve(Message* message, const absl::Status& refusal) {
  absl::Status problem = refusal;
  if (!message->request.trace_id().empty()) {
    message->trace = RequestIdOf(message->request.trace_id());
  }
  absl::StatusOr<AttendItem> item = Parse(*message, problem);
  if (!item.ok()) {
    // The sequence does not exist, so there is no layer to block.
    message->DropContents();
    Fail(*message, item.status());
    return Answered(message);
  }
  const std::shared_ptr<Sequence> sequence = item->sequence;
  const int layer_count = sequence->model->spec.layer_count;
  AttendRequest request;
  // A layer that does not exist fails when it is the message's turn, like any other problem. Layer
  // 0 is a placeholder.
  request.layer = message->request.layer() >= 0 && message->request.layer() < layer_count
                      ? message->request.layer()
                      : 0;
  request.cancel = cancel_;
  request.trace = TraceOf(*message);
  item->gate = [this, message, problem = std::move(problem)](int64_t layer_token_count) {
    return Admit(*message, problem, layer_token_count);
  };
  request.items.push_back(*std::move(item));
  services_.engine.Attend(std::move(request),
                          [this, message, sequence](absl::StatusOr<AttendOutcome> outcome) {
                            OnAttended(message, *sequence, std::move(outcome));
                          });
}

void DecodeCall::OnAttended(Message* message, const Sequence& sequence,
                            absl::StatusOr<AttendOutcome> outcome) {
  absl::Status status = outcome.status();
  if (status.ok()) {
    const JobItem& item = outcome->job->items.front();
    status = item.status;
    if (status.ok()) {
      status = FillResult(*outcome->job, item, sequence.model->spec, message->places,
                          *message->response.mutable_result());
    }
  }
  if (!status.ok()) {
    Fail(*message, status);
    const int layer = message->request.layer();
    if (layer >= 0 && layer < sequence.model->spec.layer_count) Block(*message);
  }
  Answered(message);
}

void DecodeCall::Fail(Message& message, const absl::Status& status) {
  *message.response.mutable_result()->mutable_status() =
      services_.status.ToRpc(status, TraceOf(message));
}

void DecodeCall::Block(const Message& message) {
  const MutexLock lock(mutex_);
  if (!blocked_.emplace(message.sequence(), message.request.layer()).second) return;
  absl::StatusOr<MemoryReservation> more = services_.engine.budget().Reserve(
      kBlockedBytes, "a stream's failed layers", MemoryUse::kMessages);
  if (more.ok()) {
    blocked_reservation_.Absorb(*std::move(more));
  } else {
    ended_ = true;
    end_.Update(more.status());
  }
}

void DecodeCall::Answered(Message* message) {
  Step step;
  {
    const MutexLock lock(mutex_);
    message->answered = true;
    // Queues the answers of this sequence, up to the first message without an answer.
    const std::string& sequence = message->sequence();
    for (auto it = in_flight_.begin(); it != in_flight_.end();) {
      if ((*it)->sequence() != sequence) {
        ++it;
        continue;
      }
      if (!(*it)->answered) break;
      to_write_.push_back(std::move(*it));
      it = in_flight_.erase(it);
    }
    step = Next();
  }
  Do(step);
}

}  // namespace spillway
