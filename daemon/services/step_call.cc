#include "daemon/services/step_call.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "daemon/convert/attend.h"
#include "daemon/convert/tensor.h"
#include "daemon/engine/errors.h"
#include "host/base/status_macros.h"
#include "host/device/step_layout.h"

namespace spillway {
namespace {

constexpr char kStepMethod[] = "/spillway.v1.AttentionService/Step";

// Moves the elements of a message's tensor to the end of those that arrived before.
void Gather(v1::Tensor& tensor, std::string& to) {
  if (to.empty()) {
    to = std::move(*tensor.mutable_data());
  } else {
    to += tensor.data();
  }
}

void FillShape(DType dtype, std::initializer_list<int64_t> shape, std::string data,
               v1::Tensor& tensor) {
  tensor.set_dtype(ToProto(dtype));
  for (const int64_t each : shape) tensor.add_shape(each);
  tensor.set_data(std::move(data));
}

}  // namespace

StepCall::StepCall(const ServiceContext& services, const grpc::CallbackServerContext& context,
                   Caller caller)
    : services_(services),
      caller_(std::move(caller)),
      cancel_(MakeCancelToken(context)),
      timer_(services.calls.Find(kStepMethod)),
      begun_(absl::FailedPreconditionError(
          "no step has begun on this stream: send StepRequest.begin first")) {
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

StepCall::Action StepCall::Next() {
  Action action;
  if (finished_) return action;
  const bool stop = draining_ || broken_ || !end_.ok();
  if (!busy_ && waiting_ && !stop) {
    waiting_ = false;
    busy_ = action.serve = true;
    std::swap(read_, current_);
  }
  if (!stop && !closed_ && !reading_ && !waiting_) {
    reading_ = read_starting_ = action.read = true;
  }
  // A read that waits for the client does not delay a drain: it ends with the call.
  if (!busy_ && (stop || (closed_ && !waiting_)) && !read_starting_) {
    finished_ = action.finish = true;
    action.status = draining_ && end_.ok() && !closed_ ? services_.drain.CheckNewWork() : end_;
  }
  return action;
}

void StepCall::Do(Action action) {
  while (action.read) {
    StartRead(&read_);
    const MutexLock lock(mutex_);
    read_starting_ = false;
    // Whoever serves decides again at the end.
    if (action.serve) break;
    action = Next();
  }
  if (action.serve) return Serve();
  if (!action.finish) return;
  timer_.End(static_cast<int>(action.status.code()));
  Finish(services_.status.ToGrpc(action.status, caller_.trace()));
}

void StepCall::OnReadDone(bool ok) {
  Action action;
  {
    const MutexLock lock(mutex_);
    reading_ = false;
    (ok ? waiting_ : closed_) = true;
    action = Next();
  }
  Do(std::move(action));
}

void StepCall::Served(const absl::Status& end) {
  Action action;
  {
    const MutexLock lock(mutex_);
    busy_ = false;
    end_.Update(end);
    action = Next();
  }
  Do(std::move(action));
}

void StepCall::Serve() {
  absl::StatusOr<MemoryReservation> reservation =
      ChargeMessage(current_, services_.engine.budget());
  if (absl::Status status = ParseMessage(current_, request_); !status.ok()) {
    return Served(WithMetadata(
        WithMessage(status, absl::StrCat("message ", served_count_ + 1,
                                         " of the stream: ", status.message(), "; the ",
                                         served_count_, " messages before it were served")),
        {{"message_count", absl::StrCat(served_count_)}}));
  }
  ++served_count_;
  if (request_.has_begin()) {
    begun_ = reservation.ok() ? Begin(request_.begin()) : reservation.status();
    if (!begun_.ok()) step_.reset();
  }
  absl::Status status;
  if (request_.has_attend()) {
    status = reservation.ok() ? Collect(*request_.mutable_attend(), *std::move(reservation))
                              : reservation.status();
  } else if (!request_.has_begin()) {
    status = InvalidField("attend", "neither begin nor attend is set");
  } else {
    return Served(absl::OkStatus());
  }
  const int layer = request_.attend().layer();
  request_ = v1::StepRequest();  // frees its memory
  if (!status.ok()) return Refuse(layer, status);
  if (inputs_.part_count < step_->part_count()) return Served(absl::OkStatus());
  Attend();
}

absl::Status StepCall::Begin(const v1::DecodeStep& message) {
  inputs_ = {};
  trace_ = TraceOf(caller_, message);
  ASSIGN_OR_RETURN(step_, StepFromProto(services_.engine, caller_, message));
  return absl::OkStatus();
}

int64_t StepCall::AnswerBytes(DType out_dtype) const {
  AttendQuery query;
  query.query_count = static_cast<int>(step_->token_count());
  ResultPlaces places;
  places.out_dtype = out_dtype;
  return ResultBytes(query, step_->model().spec, places);
}

absl::Status StepCall::Collect(v1::StepAttend& message, MemoryReservation reservation) {
  RETURN_IF_ERROR(begun_);
  RETURN_IF_ERROR(caller_.Check());
  const ModelSpec& spec = step_->model().spec;
  RETURN_IF_ERROR(CheckLayer(message.layer(), spec));
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
  ASSIGN_OR_RETURN(const DType out_dtype, OutDType(message.out_dtype(), q_dtype));
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
  inputs_.part_count += static_cast<int>(parts);
  inputs_.reservation.Absorb(std::move(reservation));
  Gather(*message.mutable_q(), inputs_.q);
  Gather(*message.mutable_k(), inputs_.k);
  Gather(*message.mutable_v(), inputs_.v);
  return absl::OkStatus();
}

void StepCall::Attend() {
  const ModelSpec& spec = step_->model().spec;
  const int64_t heads = int64_t{step_->part_count()} * step_->token_count() * spec.query_head_count;
  const int64_t out_bytes = heads * spec.head_dim * DTypeBytes(inputs_.out_dtype);
  // With room for the answers.
  absl::StatusOr<MemoryReservation> reservation =
      services_.engine.budget().Reserve(2 * step_->part_count() * AnswerBytes(inputs_.out_dtype),
                                        "the answer to a request", MemoryUse::kMessages);
  if (!reservation.ok()) return Refuse(inputs_.layer, reservation.status());
  outputs_.reservation = *std::move(reservation);
  outputs_.out.assign(static_cast<size_t>(out_bytes), '\0');
  outputs_.lse.assign(static_cast<size_t>(heads) * sizeof(float), '\0');
  const StepShape shape = ShapeOf(*step_);
  const auto place = [&](auto* data, int64_t head_count, DType dtype) {
    return InCOrder(data, shape, head_count, spec.head_dim * DTypeBytes(dtype));
  };
  const auto bytes = [](const std::string& of) {
    return reinterpret_cast<const std::byte*>(of.data());
  };
  StepTensors tensors;
  tensors.q_dtype = inputs_.q_dtype;
  tensors.q = place(bytes(inputs_.q), spec.query_head_count, inputs_.q_dtype);
  tensors.k = place(bytes(inputs_.k), spec.kv_head_count, spec.dtype);
  tensors.v = place(bytes(inputs_.v), spec.kv_head_count, spec.dtype);
  tensors.out_dtype = inputs_.out_dtype;
  tensors.out = place(reinterpret_cast<std::byte*>(outputs_.out.data()), spec.query_head_count,
                      inputs_.out_dtype);
  tensors.lse = reinterpret_cast<float*>(outputs_.lse.data());
  step_->Start(inputs_.layer, tensors, cancel_,
               [this](const absl::Status& status) { OnAttended(status); });
}

void StepCall::OnAttended(const absl::Status& status) {
  if (step_->last() == nullptr) return Refuse(inputs_.layer, status);
  const ModelSpec& spec = step_->model().spec;
  v1::AttendResponse results = ResultsOf(step_->last(), services_.status);
  const int64_t tokens = step_->token_count(), heads = spec.query_head_count;
  const size_t lse_bytes = static_cast<size_t>(tokens * heads) * sizeof(float);
  const size_t out_bytes =
      static_cast<size_t>(tokens * heads * spec.head_dim * DTypeBytes(inputs_.out_dtype));
  const int count = step_->part_count();
  const auto most =
      static_cast<int>(std::min<int64_t>(count, kMessageBytesMax / AnswerBytes(inputs_.out_dtype)));
  for (int start = 0; start < count; start += most) {
    const int parts = std::min(most, count - start);
    v1::StepResponse& answer = answers_.emplace_back();
    answer.set_layer(inputs_.layer);
    if (!status.ok()) *answer.mutable_status() = services_.status.ToRpc(status, trace_);
    answer.set_part_start(start);
    for (int i = start; i < start + parts; ++i) {
      answer.add_results()->Swap(results.mutable_results(i));
    }
    const auto share = [&](std::string& whole, size_t bytes) {
      if (parts == count) return std::move(whole);
      return whole.substr(static_cast<size_t>(start) * bytes, static_cast<size_t>(parts) * bytes);
    };
    FillShape(inputs_.out_dtype, {parts, tokens, heads, spec.head_dim},
              share(outputs_.out, out_bytes), *answer.mutable_out());
    FillShape(DType::kF32, {parts, tokens, heads}, share(outputs_.lse, lse_bytes),
              *answer.mutable_lse());
  }
  Write();
}

void StepCall::Refuse(int layer, const absl::Status& status) {
  v1::StepResponse& answer = answers_.emplace_back();
  answer.set_layer(layer);
  *answer.mutable_status() = services_.status.ToRpc(status, trace_);
  Write();
}

void StepCall::Write() { StartWrite(&answers_.front()); }

void StepCall::OnWriteDone(bool ok) {
  answers_.pop_front();
  if (ok && !answers_.empty()) return Write();
  answers_.clear();
  inputs_ = {};
  outputs_ = {};
  if (!ok) {
    const MutexLock lock(mutex_);
    broken_ = true;
  }
  Served(absl::OkStatus());
}

}  // namespace spillway
