#include "lib/doorbell_step.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "host/base/status_macros.h"
#include "services/convert/tensor.h"

namespace spillway {
namespace {

absl::StatusOr<DoorbellAnswer> BegunAt(Doorbell& doorbell, std::string_view description) {
  std::memcpy(doorbell.data().data(), description.data(), description.size());
  DoorbellCall call = {};
  call.kind = DoorbellCallKind::kBegin;
  call.byte_count = static_cast<int64_t>(description.size());
  return doorbell.Call(call);
}

void End(Doorbell& doorbell) {
  DoorbellCall call = {};
  call.kind = DoorbellCallKind::kEnd;
  doorbell.Post(call);
}

}  // namespace

absl::StatusOr<std::unique_ptr<DoorbellStep>> DoorbellStep::Begin(
    std::shared_ptr<DaemonSession> session, const StepDescription& description) {
  const auto description_bytes = static_cast<int64_t>(description.text.size());
  ASSIGN_OR_RETURN(std::unique_ptr<Doorbell> doorbell, session->Take(description_bytes));
  absl::StatusOr<DoorbellAnswer> answer = BegunAt(*doorbell, description.text);
  if (!answer.ok()) {
    session->Give(std::move(doorbell));
    return answer.status();
  }
  if (absl::Status same = CheckShape(description.shape, answer->shape); !same.ok()) {
    End(*doorbell);
    session->Give(std::move(doorbell));
    return same;
  }
  const int64_t data_bytes =
      std::max(description_bytes, LargestLayout(answer->shape, description.row_dtype).byte_count);
  if (data_bytes > static_cast<int64_t>(doorbell->data().size())) {
    session->Give(std::move(doorbell));
    ASSIGN_OR_RETURN(doorbell, session->Take(data_bytes));
    answer = BegunAt(*doorbell, description.text);
    if (!answer.ok()) {
      session->Give(std::move(doorbell));
      return answer.status();
    }
  }
  return std::unique_ptr<DoorbellStep>(new DoorbellStep(std::move(session), std::move(doorbell),
                                                        answer->shape, description.row_dtype));
}

DoorbellStep::~DoorbellStep() {
  if (unanswered_ && !doorbell_->answered()) {
    doorbell_->Abandon();
  } else {
    End(*doorbell_);
  }
  session_->Give(std::move(doorbell_));
}

absl::Status DoorbellStep::Ask(int layer, const StepTensors& tensors) {
  if (unanswered_) return StillUnanswered();
  const StepLayout layout(shape_, tensors.q_dtype, row_dtype_, tensors.out_dtype);
  std::byte* const data = doorbell_->data().data();
  const StepTensors shared = layout.At(data, tensors.lse != nullptr);
  // This process may write to the doorbell's memory until it rings.
  const auto mine = [](const StepPlace<const std::byte>& place) {
    return StepPlace<std::byte>{const_cast<std::byte*>(place.data), place.sequence_stride,
                                place.token_stride, place.head_stride};
  };
  CopyStepRows(RowsOf(shape_, shape_.query_head_count, tensors.q_dtype), tensors.q, mine(shared.q));
  CopyStepRows(RowsOf(shape_, shape_.kv_head_count, row_dtype_), tensors.k, mine(shared.k));
  CopyStepRows(RowsOf(shape_, shape_.kv_head_count, row_dtype_), tensors.v, mine(shared.v));
  RETURN_IF_ERROR(doorbell_->Ring(AttendCall(DoorbellCallKind::kAttend, layer, tensors)));
  unanswered_ = true;
  return absl::OkStatus();
}

std::optional<absl::Status> DoorbellStep::Await(const StepTensors& tensors,
                                                BellWaiter::Clock::time_point deadline) {
  if (!unanswered_) return NothingAsked();
  const absl::StatusOr<std::optional<DoorbellAnswer>> answer = doorbell_->Answer(deadline);
  if (answer.ok() && !answer->has_value()) return std::nullopt;
  unanswered_ = false;
  // If one sequence fails, the outputs of the others are still valid.
  const StepTensors shared = StepLayout(shape_, tensors.q_dtype, row_dtype_, tensors.out_dtype)
                                 .At(doorbell_->data().data(), tensors.lse != nullptr);
  CopyStepRows(RowsOf(shape_, shape_.query_head_count, tensors.out_dtype), shared.out, tensors.out);
  if (tensors.lse != nullptr) {
    std::copy_n(shared.lse,
                int64_t{shape_.sequence_count} * shape_.token_count * shape_.query_head_count,
                tensors.lse);
  }
  return answer.status();
}

absl::StatusOr<v1::AttendResponse> DoorbellStep::Results() {
  if (unanswered_) return StillUnanswered();
  DoorbellCall call = {};
  call.kind = DoorbellCallKind::kResults;
  ASSIGN_OR_RETURN(const std::string message, doorbell_->CallForAll(call));
  v1::AttendResponse results;
  if (!results.ParseFromString(message)) return NoSense();
  return results;
}

}  // namespace spillway
