#include "services/step_call.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "engine/errors.h"
#include "grpc/grpc.h"
#include "host/base/status_macros.h"
#include "host/device/step_layout.h"
#include "services/convert/attend.h"
#include "services/convert/tensor.h"

namespace spillway {
namespace {

constexpr char kStepMethod[] = "/spillway.v1.AttentionService/Step";
// Bytes of an answer beside its tensors, results and status.
constexpr int64_t kAnswerFrameBytes = 256;

// Frees what an object holds. An assignment would let its strings keep their memory.
template <typename T>
void Free(T& of) {
  T fresh;
  std::swap(of, fresh);
}

}  // namespace

StepCall::StepCall(const ServiceContext& services, grpc::CallbackServerContext& context,
                   Caller caller)
    : services_(services),
      context_(context),
      caller_(std::move(caller)),
      cancel_(MakeCancelToken(context)),
      timer_(services.calls.Find(kStepMethod)),
      begun_(absl::FailedPreconditionError(
          "no step has begun on this stream: send StepRequest.begin first")),
      idle_(services.limits.stream_idle_max()) {
  const absl::Status added = services_.streams.Add(this);
  Action action;
  {
    const MutexLock lock(mutex_);
    end_ = added;
    action = Next();
  }
  Do(std::move(action));
}

void StepCall::OnDone() {
  services_.streams.Remove(this);
  delete this;
}

void StepCall::Drain() {
  Action action;
  {
    const MutexLock lock(mutex_);
    draining_ = true;
    action = Next();
  }
  Do(std::move(action));
}

void StepCall::CheckIdle(Clock::time_point now) {
  Action action;
  std::string unread;
  {
    const MutexLock lock(mutex_);
    if (finished_ || !end_.ok()) return;
    if (writing_) {
      end_ = idle_.CheckReader(now);
      if (end_.ok()) return;
      unread = std::string(end_.message());
    } else if (partial_ && !busy_ && !waiting_) {
      end_ = idle_.Check(now);
      action = Next();
    }
  }
  // Finish would queue its status behind data that the client does not read. This sends a status
  // before them and makes the write fail.
  if (!unread.empty()) {
    grpc_call_cancel_with_status(context_.c_call(), GRPC_STATUS_ABORTED, unread.c_str(), nullptr);
  }
  Do(std::move(action));
}

StepCall::Action StepCall::Next() {
  Action action;
  if (finished_) return action;
  const bool stop = draining_ || broken_ || !end_.ok();
  if (!busy_ && waiting_ && !stop) {
    waiting_ = false;
    busy_ = action.serve = true;
    current_.Swap(&read_);
    current_reservation_ = std::move(read_reservation_);
  }
  if (!stop && !closed_ && !reading_ && !waiting_) {
    reading_ = action.read = true;
    ++starting_read_count_;
  }
  // A read that waits for the client does not delay a drain: it ends with the call.
  if (!busy_ && (stop || closed_) && starting_read_count_ == 0) {
    finished_ = action.finish = true;
    if (!end_.ok()) {
      action.status = end_;
    } else if (draining_ && !closed_) {
      action.status = services_.drain.CheckNewWork();
    } else if (partial_) {
      action.status = InvalidField("attend.part_start",
                                   "the stream has ended before all parts of a layer had arrived");
    }
  }
  return action;
}

void StepCall::Do(Action action) {
  // A loop, because messages that need no answer are served at once.
  while (action.read || action.serve) {
    std::optional<absl::Status> served;
    if (action.serve) served = Serve();
    // If it is answered by another thread, that thread may end the call, unless a read is about to
    // start.
    if (action.read) {
      StartRead(&read_);
    } else if (!served.has_value()) {
      return;
    }
    const MutexLock lock(mutex_);
    if (action.read) --starting_read_count_;
    if (served.has_value()) {
      busy_ = false;
      // Parts that are dropped do not complete a layer.
      if (!refused_layer_.has_value()) idle_.Renew();
      partial_ = inputs_.part_count > 0;
      end_.Update(*served);
    }
    action = Next();
  }
  if (!action.finish) return;
  timer_.End(static_cast<int>(action.status.code()));
  Finish(services_.status.ToGrpc(action.status, caller_.trace()));
}

void StepCall::OnReadDone(bool ok) {
  absl::StatusOr<MemoryReservation> reservation;
  if (ok) reservation = ChargeMessage(read_, services_.engine.budget());
  Action action;
  {
    const MutexLock lock(mutex_);
    reading_ = false;
    (ok ? waiting_ : closed_) = true;
    read_reservation_ = std::move(reservation);
    action = Next();
  }
  Do(std::move(action));
}

std::optional<absl::Status> StepCall::Serve() {
  const v1::StepRequest empty;
  absl::StatusOr<MemoryReservation> reservation = std::move(current_reservation_);
  current_reservation_ = MemoryReservation();
  if (absl::Status status =
          ParseMessage(current_, request_, /*inner=*/v1::StepRequest::kBeginFieldNumber);
      !status.ok()) {
    request_ = empty;
    return WithMetadata(
        WithMessage(status, absl::StrCat("message ", served_count_ + 1,
                                         " of the stream: ", status.message(), "; the ",
                                         served_count_, " messages before it were read")),
        {{"message_count", absl::StrCat(served_count_)}});
  }
  ++served_count_;
  const absl::Status charged = reservation.status();
  if (request_.has_begin()) Begin(request_.begin(), charged);
  if (!request_.has_attend()) {
    const bool begins = request_.has_begin();
    request_ = empty;
    if (begins) return absl::OkStatus();
    return InvalidField("attend", "neither begin nor attend is set");
  }
  const int layer = request_.attend().layer();
  // Only the parts that follow what was refused are dropped, not those of another attempt.
  if (request_.attend().part_start() == 0 || refused_layer_ != layer) refused_layer_.reset();
  const bool dropped = refused_layer_.has_value();
  absl::Status status = charged;
  if (status.ok() && !dropped) {
    status = Collect(*request_.mutable_attend(), *std::move(reservation));
  }
  request_ = empty;  // frees its memory
  if (dropped) return absl::OkStatus();
  if (!status.ok()) {
    refused_layer_ = layer;
    Refuse(layer, status);
    return std::nullopt;
  }
  if (inputs_.part_count < step_->part_count()) return absl::OkStatus();
  Attend();
  return std::nullopt;
}

void StepCall::Begin(const v1::DecodeStep& message, const absl::Status& charged) {
  step_.reset();
  Free(inputs_);
  refused_layer_.reset();
  trace_ = TraceOf(caller_, message);
  begun_ = charged;
  if (!begun_.ok()) return;
  absl::StatusOr<std::unique_ptr<Step>> step = StepFromProto(services_.engine, caller_, message);
  begun_ = step.status();
  if (step.ok()) step_ = *std::move(step);
}

int64_t StepCall::AnswerBytes(DType out_dtype) const {
  AttendQuery query;
  query.query_count = static_cast<int>(step_->token_count());
  ResultPlaces places;
  places.out_dtype = out_dtype;
  return ResultBytes(query, step_->model().spec, places);
}

absl::Status StepCall::Charge(int64_t bytes, MemoryReservation& reservation,
                              AccountCharge& charge) {
  AccountCharge more(services_.engine.accounts().Of(caller_.name_space()));
  RETURN_IF_ERROR(more.Add(bytes));
  ASSIGN_OR_RETURN(reservation, services_.engine.budget().Reserve(bytes, "a step's tensors"));
  charge = std::move(more);
  return absl::OkStatus();
}

absl::Status StepCall::Collect(v1::StepAttend& message, MemoryReservation reservation) {
  RETURN_IF_ERROR(begun_);
  RETURN_IF_ERROR(caller_.Check());
  const ModelSpec& spec = step_->model().spec;
  RETURN_IF_ERROR(CheckLayer(message.layer(), spec, "attend.layer"));
  const bool first = inputs_.part_count == 0;
  if (!first && message.layer() != inputs_.layer) {
    return InvalidField("attend.layer",
                        absl::StrCat("value ", message.layer(), ", but layer ", inputs_.layer,
                                     " has only its first ", inputs_.part_count, " parts"));
  }
  if (message.part_start() != inputs_.part_count) {
    return InvalidField("attend.part_start",
                        absl::StrCat("value ", message.part_start(), ", but part ",
                                     inputs_.part_count, " of the layer is the next"));
  }
  const CallerRegions regions(services_.regions, caller_);
  const auto view = [&](const v1::Tensor& tensor, int64_t parts, int64_t heads,
                        const std::string& field) -> absl::StatusOr<DType> {
    if (tensor.has_slice()) {
      return InvalidField(field + ".slice", "a step's tensors are in their message");
    }
    ASSIGN_OR_RETURN(
        const TensorView viewed,
        ViewTensor(tensor, {parts, step_->token_count(), heads, spec.head_dim}, regions, field));
    return viewed.dtype;
  };
  ASSIGN_OR_RETURN(const DType q_dtype,
                   view(message.q(), kAnyDim, spec.query_head_count, "attend.q"));
  const int64_t parts = message.q().shape(0);
  if (parts > step_->part_count() - inputs_.part_count) {
    return InvalidField("attend.q.shape",
                        absl::StrCat(parts, " parts from ", inputs_.part_count,
                                     " on are not in [0, ", step_->part_count(), ")"));
  }
  ASSIGN_OR_RETURN(const DType out_dtype,
                   OutDType(message.out_dtype(), q_dtype, "attend.out_dtype"));
  if (!first && (q_dtype != inputs_.q_dtype || out_dtype != inputs_.out_dtype)) {
    return InvalidField("attend.q.dtype",
                        "the types of q and out are not those of the layer's first parts");
  }
  for (const auto& [rows, field] :
       {std::pair<const v1::Tensor&, const char*>(message.k(), "attend.k"),
        {message.v(), "attend.v"}}) {
    ASSIGN_OR_RETURN(const DType dtype, view(rows, parts, spec.kv_head_count, field));
    if (dtype != spec.dtype) {
      return InvalidField(absl::StrCat(field, ".dtype"),
                          absl::StrCat(v1::DType_Name(ToProto(dtype)), " is not the model's, ",
                                       v1::DType_Name(ToProto(spec.dtype))));
    }
  }
  if (AnswerBytes(out_dtype) > kMessageBytesMax) {
    return InvalidField("attend.q.shape",
                        absl::StrCat("the answer for one part would take ", AnswerBytes(out_dtype),
                                     " bytes, more than ", kMessageBytesMax));
  }
  inputs_.layer = message.layer();
  inputs_.q_dtype = q_dtype;
  inputs_.out_dtype = out_dtype;
  if (first && parts == step_->part_count()) {
    inputs_.q = std::move(*message.mutable_q()->mutable_data());
    inputs_.k = std::move(*message.mutable_k()->mutable_data());
    inputs_.v = std::move(*message.mutable_v()->mutable_data());
    inputs_.reservation = std::move(reservation);
  } else {
    if (first) {
      RETURN_IF_ERROR(MakeRoom());
    }
    inputs_.q += message.q().data();
    inputs_.k += message.k().data();
    inputs_.v += message.v().data();
  }
  inputs_.part_count += static_cast<int>(parts);
  return absl::OkStatus();
}

absl::Status StepCall::MakeRoom() {
  const ModelSpec& spec = step_->model().spec;
  const int64_t tokens = int64_t{step_->part_count()} * step_->token_count() * spec.head_dim;
  const int64_t q_bytes = tokens * spec.query_head_count * DTypeBytes(inputs_.q_dtype);
  const int64_t row_bytes = tokens * spec.kv_head_count * DTypeBytes(spec.dtype);
  RETURN_IF_ERROR(Charge(q_bytes + 2 * row_bytes, inputs_.reservation, inputs_.charge));
  inputs_.q.reserve(static_cast<size_t>(q_bytes));
  inputs_.k.reserve(static_cast<size_t>(row_bytes));
  inputs_.v.reserve(static_cast<size_t>(row_bytes));
  return absl::OkStatus();
}

void StepCall::Attend() {
  const ModelSpec& spec = step_->model().spec;
  const int64_t heads = int64_t{step_->part_count()} * step_->token_count() * spec.query_head_count;
  const int64_t out_bytes = heads * spec.head_dim * DTypeBytes(inputs_.out_dtype);
  const int64_t answer_bytes = step_->part_count() * AnswerBytes(inputs_.out_dtype);
  // The outputs and results, those of the job in float32, and the message that is written.
  const int64_t bytes = answer_bytes + heads * spec.head_dim * int64_t{sizeof(float)} +
                        std::min(answer_bytes, kMessageBytesMax);
  absl::Status charged;
  if (answer_bytes <= kMessageBytesMax) {
    absl::StatusOr<MemoryReservation> reservation =
        services_.engine.budget().Reserve(bytes, "the answer to a request", MemoryUse::kMessages);
    charged = reservation.status();
    if (reservation.ok()) outputs_.reservation = *std::move(reservation);
  } else {
    charged = Charge(bytes, outputs_.reservation, outputs_.charge);
  }
  if (!charged.ok()) return Refuse(inputs_.layer, charged);
  outputs_.layer = inputs_.layer;
  outputs_.dtype = inputs_.out_dtype;
  outputs_.out.assign(static_cast<size_t>(out_bytes), '\0');
  outputs_.lse.assign(static_cast<size_t>(heads) * sizeof(float), '\0');
  const auto elements = [](const std::string& of) {
    return reinterpret_cast<const std::byte*>(of.data());
  };
  const StepData data = {elements(inputs_.q), elements(inputs_.k), elements(inputs_.v),
                         reinterpret_cast<std::byte*>(outputs_.out.data()),
                         reinterpret_cast<float*>(outputs_.lse.data())};
  const StepTensors tensors =
      InCOrder(data, ShapeOf(*step_), inputs_.q_dtype, spec.dtype, inputs_.out_dtype);
  step_->Start(inputs_.layer, tensors, cancel_,
               [this](const absl::Status& status) { OnAttended(status); });
}

void StepCall::OnAttended(const absl::Status& status) {
  if (step_->last() == nullptr) return Refuse(inputs_.layer, status);
  if (!status.ok()) outputs_.status = services_.status.ToRpc(status, trace_);
  outputs_.results = ResultsOf(step_->last(), services_.status, trace_);
  step_->DropLast();
  Free(inputs_);
  Write();
}

void StepCall::Refuse(int layer, const absl::Status& status) {
  Free(inputs_);
  Free(outputs_);
  outputs_.layer = layer;
  outputs_.status = services_.status.ToRpc(status, trace_);
  Write();
}

void StepCall::Write() {
  answer_.Clear();
  answer_.set_layer(outputs_.layer);
  if (outputs_.status.code() != 0) *answer_.mutable_status() = outputs_.status;
  const int count = outputs_.results.results_size(), start = outputs_.answered_count;
  if (count > 0) {
    const ModelSpec& spec = step_->model().spec;
    const int64_t tokens = step_->token_count(), heads = spec.query_head_count;
    const auto lse_bytes = static_cast<size_t>(tokens * heads) * sizeof(float);
    const auto out_bytes =
        static_cast<size_t>(tokens * heads * spec.head_dim * DTypeBytes(outputs_.dtype));
    auto room = static_cast<int64_t>(kMessageBytesMax - kAnswerFrameBytes -
                                     static_cast<int64_t>(outputs_.status.ByteSizeLong()));
    int end = start;
    for (; end < count; ++end) {
      v1::AttendResult& result = *outputs_.results.mutable_results(end);
      // Its own bytes, and those of its tag and length.
      room -= static_cast<int64_t>(lse_bytes + out_bytes + result.ByteSizeLong()) + 8;
      if (room < 0 && end > start) break;
      answer_.add_results()->Swap(&result);
    }
    const auto share = [&](std::string& whole, size_t bytes) {
      if (start == 0 && end == count) return std::move(whole);
      return whole.substr(static_cast<size_t>(start) * bytes,
                          static_cast<size_t>(end - start) * bytes);
    };
    answer_.set_part_start(start);
    SetShape(outputs_.dtype, {end - start, tokens, heads, spec.head_dim}, *answer_.mutable_out());
    answer_.mutable_out()->set_data(share(outputs_.out, out_bytes));
    SetShape(DType::kF32, {end - start, tokens, heads}, *answer_.mutable_lse());
    answer_.mutable_lse()->set_data(share(outputs_.lse, lse_bytes));
    outputs_.answered_count = end;
  }
  {
    const MutexLock lock(mutex_);
    writing_ = true;
    idle_.Renew();
  }
  StartWrite(&answer_);
}

void StepCall::OnWriteDone(bool ok) {
  {
    const MutexLock lock(mutex_);
    writing_ = false;
  }
  if (ok && outputs_.answered_count < outputs_.results.results_size()) return Write();
  answer_ = v1::StepResponse();  // frees its memory
  Free(outputs_);
  Action action;
  {
    const MutexLock lock(mutex_);
    broken_ |= !ok;
    busy_ = partial_ = false;
    action = Next();
  }
  Do(std::move(action));
}

}  // namespace spillway
