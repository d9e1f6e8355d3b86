#include "clients/c/message_step.h"

#include <algorithm>
#include <chrono>
#include <cstring>
#include <utility>

#include "absl/strings/str_cat.h"
#include "clients/c/daemon_session.h"
#include "daemon/convert/tensor.h"
#include "grpc/slice.h"
#include "host/base/status_macros.h"

namespace spillway {
namespace {

constexpr char kMethod[] = "/spillway.v1.AttentionService/Decode";

// Layouts of one sequence's elements in a message: [T, H, d] for queries and outputs, [H, T, d] for
// keys and values.
template <typename Byte>
StepPlace<Byte> TokensOfHeads(Byte* data, const StepRows& rows) {
  return {data, 0, rows.head_count * rows.bytes, rows.bytes};
}
template <typename Byte>
StepPlace<Byte> HeadsOfTokens(Byte* data, const StepRows& rows) {
  return {data, 0, rows.bytes, rows.token_count * rows.bytes};
}

std::byte* Room(v1::Tensor& tensor, const StepRows& rows) {
  std::string& data = *tensor.mutable_data();
  data.resize(static_cast<size_t>(rows.token_count * rows.head_count * rows.bytes));
  return reinterpret_cast<std::byte*>(data.data());
}

// One sequence's part of a tensor.
template <typename Byte>
StepPlace<Byte> Part(const StepPlace<Byte>& whole, int64_t sequence) {
  return {whole.At(sequence), 0, whole.token_stride, whole.head_stride};
}

}  // namespace

absl::StatusOr<std::unique_ptr<MessageStep>> MessageStep::Begin(
    std::shared_ptr<grpc::Channel> channel, std::string client_id, std::string_view description,
    StepShape shape) {
  v1::DecodeStep step;
  if (!step.ParseFromArray(description.data(), static_cast<int>(description.size()))) {
    return absl::InvalidArgumentError("the description is not a serialised spillway.v1.DecodeStep");
  }
  shape.sequence_count = step.parts_size();
  shape.token_count = step.token_count();
  const std::optional<DType> row_dtype = FromProto(static_cast<v1::DType>(shape.row_dtype));
  if (!row_dtype || std::min({shape.sequence_count, shape.token_count, shape.query_head_count,
                              shape.kv_head_count, shape.head_dim}) < 1) {
    return absl::InvalidArgumentError(absl::StrCat(
        "a step of ", shape.sequence_count, " sequences, ", shape.token_count, " tokens, ",
        shape.query_head_count, " query heads, ", shape.kv_head_count, " KV heads of ",
        shape.head_dim, " and row_dtype ", shape.row_dtype, ": none may be below 1"));
  }
  std::vector<v1::DecodeRequest> requests;
  for (const v1::DecodeStep::Part& part : step.parts()) {
    v1::DecodeRequest& request = requests.emplace_back();
    request.set_sequence(part.sequence());
    request.mutable_append()->set_token_start(part.token_start());
    request.mutable_append()->set_generation(part.generation());
    for (v1::Tensor* rows :
         {request.mutable_append()->mutable_k(), request.mutable_append()->mutable_v()}) {
      rows->set_dtype(ToProto(*row_dtype));
      for (const int64_t each : {shape.kv_head_count, shape.token_count, shape.head_dim}) {
        rows->add_shape(each);
      }
    }
    for (const int64_t each : {shape.token_count, shape.query_head_count, shape.head_dim}) {
      request.mutable_q()->add_shape(each);
    }
    if (step.has_policy()) *request.mutable_policy() = step.policy();
    request.set_trace_id(step.trace_id());
  }
  return std::unique_ptr<MessageStep>(new MessageStep(std::move(channel), std::move(client_id),
                                                      step.trace_id(), shape, *row_dtype,
                                                      std::move(requests)));
}

MessageStep::MessageStep(std::shared_ptr<grpc::Channel> channel, std::string client_id,
                         std::string trace, const StepShape& shape, DType row_dtype,
                         std::vector<v1::DecodeRequest> requests)
    : channel_(std::move(channel)),
      client_id_(std::move(client_id)),
      trace_(std::move(trace)),
      shape_(shape),
      row_dtype_(row_dtype),
      requests_(std::move(requests)),
      results_(requests_.size()) {
  Open();
}

void MessageStep::Open() {
  call_ =
      std::make_unique<spillway_call>(channel_, kMethod, /*timeout_seconds=*/0, client_id_, trace_);
}

std::string MessageStep::DetailsOf(const absl::Status& status) const {
  return DaemonDetails(status);
}

std::vector<grpc::Slice> MessageStep::Messages(int layer, const StepTensors& tensors) {
  StepRows queries = RowsOf(shape_, shape_.query_head_count, tensors.q_dtype);
  StepRows rows = RowsOf(shape_, shape_.kv_head_count, row_dtype_);
  queries.sequence_count = rows.sequence_count = 1;
  std::vector<grpc::Slice> messages;
  messages.reserve(requests_.size());
  for (size_t i = 0; i < requests_.size(); ++i) {
    v1::DecodeRequest& request = requests_[i];
    const auto sequence = static_cast<int64_t>(i);
    request.set_correlation_id(first_id_ + i);
    request.set_layer(layer);
    request.mutable_q()->set_dtype(ToProto(tensors.q_dtype));
    request.set_out_dtype(tensors.out_dtype == tensors.q_dtype ? v1::DTYPE_UNSPECIFIED
                                                               : ToProto(tensors.out_dtype));
    CopyStepRows(queries, Part(tensors.q, sequence),
                 TokensOfHeads(Room(*request.mutable_q(), queries), queries));
    v1::NewRows& append = *request.mutable_append();
    CopyStepRows(rows, Part(tensors.k, sequence),
                 HeadsOfTokens(Room(*append.mutable_k(), rows), rows));
    CopyStepRows(rows, Part(tensors.v, sequence),
                 HeadsOfTokens(Room(*append.mutable_v(), rows), rows));
    grpc_slice message = grpc_slice_malloc(request.ByteSizeLong());
    request.SerializeWithCachedSizesToArray(GRPC_SLICE_START_PTR(message));
    messages.emplace_back(message, grpc::Slice::STEAL_REF);
  }
  return messages;
}

absl::Status MessageStep::Ask(int layer, const StepTensors& tensors) {
  if (unanswered_ > 0) return StillUnanswered();
  if (call_ == nullptr) Open();
  first_id_ += requests_.size();
  std::vector<grpc::Slice> messages = Messages(layer, tensors);
  call_->Ask(messages);
  for (v1::AttendResult& result : results_) result.mutable_status()->set_code(0);
  unanswered_ = static_cast<int>(requests_.size());
  return absl::OkStatus();
}

std::optional<absl::Status> MessageStep::Await(const StepTensors& tensors,
                                               BellWaiter::Clock::time_point deadline) {
  if (unanswered_ == 0) return NothingAsked();
  absl::Status broken;
  while (unanswered_ > 0 && broken.ok()) {
    const void* message = nullptr;
    size_t size = 0;
    const int received = call_->Receive(deadline, &message, &size);
    if (received == SPILLWAY_TIMED_OUT) return std::nullopt;
    if (received == SPILLWAY_RECEIVED) {
      broken = Take(message, size, tensors);
      --unanswered_;
    } else {
      broken = call_->status().ok()
                   ? absl::UnavailableError("the daemon ended the stream with steps in flight")
                   : FromDaemon(call_->status());
    }
  }
  unanswered_ = 0;
  for (const v1::AttendResult& result : results_) {
    if (broken.ok() && result.status().code() != 0) broken = FromDaemon(result.status());
  }
  // After a failure, the daemon refuses later messages for this sequence and layer on the same
  // stream until one starts at the layer's length. A new stream has no such memory.
  if (!broken.ok()) call_.reset();
  return broken;
}

absl::Status MessageStep::Take(const void* message, size_t size, const StepTensors& tensors) {
  if (!response_.ParseFromArray(message, static_cast<int>(size))) return NoSense();
  const uint64_t index = response_.correlation_id() - first_id_;
  if (index >= results_.size()) return NoSense();
  v1::AttendResult& result = results_[index];
  result.Swap(response_.mutable_result());
  if (result.status().code() != 0) return absl::OkStatus();
  StepRows rows = RowsOf(shape_, shape_.query_head_count, tensors.out_dtype);
  rows.sequence_count = 1;
  const auto head_count = static_cast<size_t>(rows.token_count * rows.head_count);
  if (result.out().data().size() != head_count * static_cast<size_t>(rows.bytes) ||
      result.lse().data().size() != head_count * sizeof(float)) {
    return NoSense();
  }
  const auto* const out = reinterpret_cast<const std::byte*>(result.out().data().data());
  CopyStepRows(rows, TokensOfHeads(out, rows), Part(tensors.out, static_cast<int64_t>(index)));
  if (tensors.lse != nullptr) {
    std::memcpy(tensors.lse + index * head_count, result.lse().data().data(),
                result.lse().data().size());
  }
  return absl::OkStatus();
}

absl::StatusOr<v1::AttendResponse> MessageStep::Results() {
  if (unanswered_ > 0) return StillUnanswered();
  v1::AttendResponse all;
  for (v1::AttendResult& result : results_) {
    result.clear_out();
    result.clear_lse();
    *all.add_results() = result;
  }
  return all;
}

}  // namespace spillway
