#include "lib/message_step.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "absl/strings/str_cat.h"
#include "engine/checks.h"
#include "grpc/slice.h"
#include "host/base/status_macros.h"
#include "lib/daemon_session.h"
#include "services/convert/attend.h"
#include "services/convert/tensor.h"
#include "services/convert/trace.h"

namespace spillway {
namespace {

constexpr char kStepMethod[] = "/spillway.v1.AttentionService/Step";
// What a message has beside its tensors and the step's description.
constexpr int64_t kStepMessageRest = 512;

// Copies the elements of some of a step's sequences to a tensor of a message.
void FillRows(const StepPlace<const std::byte>& from, const StepShape& shape, int64_t head_count,
              DType dtype, v1::Tensor& tensor) {
  SetShape(dtype, {shape.sequence_count, shape.token_count, head_count, shape.head_dim}, tensor);
  const StepRows rows = RowsOf(shape, head_count, dtype);
  std::string& data = *tensor.mutable_data();
  data.resize(
      static_cast<size_t>(rows.sequence_count * rows.token_count * head_count * rows.bytes));
  CopyStepRows(rows, from,
               InCOrder(reinterpret_cast<std::byte*>(data.data()), shape, head_count, rows.bytes));
}

// The same tensor from a later sequence on.
template <typename Byte>
StepPlace<Byte> From(const StepPlace<Byte>& whole, int64_t sequence) {
  return {whole.At(sequence), whole.sequence_stride, whole.token_stride, whole.head_stride};
}

}  // namespace

absl::StatusOr<std::unique_ptr<MessageStep>> MessageStep::Begin(
    std::shared_ptr<grpc::Channel> channel, std::string client_id,
    std::function<void()> when_unavailable, const StepDescription& description) {
  // Within what the API allows, no size overflows.
  const StepShape& shape = description.shape;
  RETURN_IF_ERROR(CheckStep(static_cast<size_t>(shape.sequence_count), shape.token_count));
  RETURN_IF_ERROR(CheckTraceId(description.message.trace_id()));
  return std::unique_ptr<MessageStep>(new MessageStep(std::move(channel), std::move(client_id),
                                                      std::move(when_unavailable), description));
}

MessageStep::MessageStep(std::shared_ptr<grpc::Channel> channel, std::string client_id,
                         std::function<void()> when_unavailable, const StepDescription& description)
    : channel_(std::move(channel)),
      client_id_(std::move(client_id)),
      when_unavailable_(std::move(when_unavailable)),
      step_(description.message),
      shape_(description.shape),
      row_dtype_(description.row_dtype) {}

void MessageStep::Open() {
  call_.reset(new spillway_call(channel_, kStepMethod, /*timeout_seconds=*/0, client_id_,
                                step_.trace_id(), when_unavailable_));
  begun_ = false;
}

std::string MessageStep::DetailsOf(const absl::Status& status) const {
  return DaemonDetails(status);
}

absl::StatusOr<std::vector<grpc::Slice>> MessageStep::Messages(int layer,
                                                               const StepTensors& tensors) {
  const int64_t part_bytes = int64_t{shape_.token_count} * shape_.head_dim *
                             (int64_t{shape_.query_head_count} * DTypeBytes(tensors.q_dtype) +
                              2 * int64_t{shape_.kv_head_count} * DTypeBytes(row_dtype_));
  std::vector<grpc::Slice> messages;
  for (int start = 0; start < shape_.sequence_count;) {
    v1::StepRequest request;
    if (start == 0 && !begun_) *request.mutable_begin() = step_;
    const int64_t room =
        kMessageBytesMax - kStepMessageRest - static_cast<int64_t>(request.begin().ByteSizeLong());
    if (part_bytes > room) {
      return absl::InvalidArgumentError(absl::StrCat("q, k and v of one sequence take ", part_bytes,
                                                     " bytes; a message has room for ", room));
    }
    StepShape shape = shape_;
    shape.sequence_count =
        static_cast<int32_t>(std::min<int64_t>(shape_.sequence_count - start, room / part_bytes));
    v1::StepAttend& attend = *request.mutable_attend();
    attend.set_layer(layer);
    attend.set_part_start(start);
    FillRows(From(tensors.q, start), shape, shape.query_head_count, tensors.q_dtype,
             *attend.mutable_q());
    FillRows(From(tensors.k, start), shape, shape.kv_head_count, row_dtype_, *attend.mutable_k());
    FillRows(From(tensors.v, start), shape, shape.kv_head_count, row_dtype_, *attend.mutable_v());
    attend.set_out_dtype(tensors.out_dtype == tensors.q_dtype ? v1::DTYPE_UNSPECIFIED
                                                              : ToProto(tensors.out_dtype));
    grpc_slice message = grpc_slice_malloc(request.ByteSizeLong());
    request.SerializeWithCachedSizesToArray(GRPC_SLICE_START_PTR(message));
    messages.emplace_back(message, grpc::Slice::STEAL_REF);
    start += shape.sequence_count;
  }
  return messages;
}

absl::Status MessageStep::Ask(int layer, const StepTensors& tensors) {
  if (unanswered_) return StillUnanswered();
  results_.Clear();
  if (call_ == nullptr) Open();
  ASSIGN_OR_RETURN(std::vector<grpc::Slice> messages, Messages(layer, tensors));
  call_->Ask(messages);
  begun_ = unanswered_ = true;
  layer_ = layer;
  return absl::OkStatus();
}

std::optional<absl::Status> MessageStep::Await(const StepTensors& tensors,
                                               BellWaiter::Clock::time_point deadline) {
  if (!unanswered_) return NothingAsked();
  absl::Status status;
  for (bool complete = false; !complete;) {
    const void* message = nullptr;
    size_t size = 0;
    const int received = call_->Receive(deadline, &message, &size);
    if (received == SPILLWAY_TIMED_OUT) return std::nullopt;
    if (received == SPILLWAY_RECEIVED) {
      status = Take(message, size, tensors, complete);
    } else {
      complete = true;
      status = call_->status().ok()
                   ? absl::UnavailableError("the daemon ended the stream with a step in flight")
                   : FromDaemon(call_->status());
    }
  }
  unanswered_ = false;
  // The daemon may have ended the stream, or have tensors of some sequences only.
  if (!status.ok()) call_.reset();
  if (results_.results_size() != shape_.sequence_count) results_.Clear();
  return status;
}

absl::Status MessageStep::Take(const void* message, size_t size, const StepTensors& tensors,
                               bool& complete) {
  const auto invalid = [&] {
    complete = true;
    return NoSense();
  };
  if (!response_.ParseFromArray(message, static_cast<int>(size))) return invalid();
  const int start = response_.part_start(), count = response_.results_size();
  const absl::Status status =
      response_.status().code() == 0 ? absl::OkStatus() : FromDaemon(response_.status());
  complete = (count == 0 && !status.ok()) || start + count == shape_.sequence_count;
  if (count == 0) return status.ok() ? invalid() : status;
  StepShape shape = shape_;
  shape.sequence_count = count;
  const StepRows rows = RowsOf(shape, shape_.query_head_count, tensors.out_dtype);
  const auto head_count = static_cast<size_t>(rows.token_count * rows.head_count);
  const std::string& out = response_.out().data();
  const std::string& lse = response_.lse().data();
  if (response_.layer() != layer_ || start != results_.results_size() ||
      count > shape_.sequence_count - start ||
      out.size() != static_cast<size_t>(count) * head_count * static_cast<size_t>(rows.bytes) ||
      lse.size() != static_cast<size_t>(count) * head_count * sizeof(float)) {
    return invalid();
  }
  for (v1::AttendResult& result : *response_.mutable_results()) {
    results_.add_results()->Swap(&result);
  }
  CopyStepRows(
      rows,
      InCOrder(reinterpret_cast<const std::byte*>(out.data()), shape, rows.head_count, rows.bytes),
      From(tensors.out, start));
  if (tensors.lse != nullptr) {
    std::memcpy(tensors.lse + static_cast<size_t>(start) * head_count, lse.data(), lse.size());
  }
  return status;
}

absl::StatusOr<v1::AttendResponse> MessageStep::Results() {
  if (unanswered_) return StillUnanswered();
  return results_;
}

}  // namespace spillway
