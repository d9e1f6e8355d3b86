#include "lib/doorbell_decoder.h"

#include <chrono>
#include <cstring>
#include <optional>
#include <type_traits>

#include "host/base/status_macros.h"
#include "host/ipc/bell.h"
#include "lib/gpu.h"
#include "services/convert/tensor.h"

namespace spillway {
namespace {

// At most context lengths, an attend on a GPU takes less than this.
constexpr std::chrono::microseconds kSpinMax{500};
// How long the end of a decoder waits for a daemon that does not answer, such as a stopped one.
constexpr std::chrono::seconds kCloseTime{5};

}  // namespace

absl::StatusOr<std::unique_ptr<DoorbellDecoder>> DoorbellDecoder::Open(
    std::shared_ptr<DaemonSession> session, std::string_view description, int64_t token_count_max) {
  ASSIGN_OR_RETURN(std::unique_ptr<Doorbell> doorbell,
                   session->Take(static_cast<int64_t>(description.size())));
  // From here on, the destructor closes the decoder on every return.
  std::unique_ptr<DoorbellDecoder> decoder(
      new DoorbellDecoder(std::move(session), std::move(doorbell)));
  Doorbell& rung = *decoder->doorbell_;
  std::memcpy(rung.data().data(), description.data(), description.size());
  DoorbellCall call = {};
  call.kind = DoorbellCallKind::kOpenDecoder;
  call.byte_count = static_cast<int64_t>(description.size());
  call.offset = token_count_max;
  ASSIGN_OR_RETURN(const DoorbellAnswer answer, rung.Call(call));
  RETURN_IF_ERROR(decoder->Map(answer));
  rung.SetSpinMax(kSpinMax);
  return decoder;
}

absl::Status DoorbellDecoder::Map(const DoorbellAnswer& answer) {
  DecoderMemory memory;
  if (answer.byte_count != static_cast<int64_t>(sizeof(memory))) return NoSense();
  std::memcpy(&memory, doorbell_->data().data(), sizeof(memory));
  const std::optional<DType> row_dtype = FromProto(static_cast<v1::DType>(answer.shape.row_dtype));
  if (!row_dtype) return NoSense();
  shape_ = answer.shape;
  row_dtype_ = *row_dtype;
  if (LargestLayout(shape_, row_dtype_).byte_count > memory.byte_count) return NoSense();
  memory.device[sizeof(memory.device) - 1] = '\0';
  ASSIGN_OR_RETURN(gpu_, MapGpuMemory(memory.device, {memory.handle, sizeof(memory.handle)}));
  return absl::OkStatus();
}

DoorbellDecoder::~DoorbellDecoder() {
  gpu_.reset();
  DoorbellCall call = {};
  call.kind = DoorbellCallKind::kCloseDecoder;
  doorbell_->Post(call);
  const auto deadline = BellWaiter::Clock::now() + kCloseTime;
  while (!doorbell_->answered() && BellWaiter::Clock::now() < deadline) {
    if (!doorbell_->Answer(deadline).ok()) break;
  }
  // A daemon that does not answer ends the decoder with the session.
  if (!doorbell_->answered() && !doorbell_->broken()) return;
  doorbell_->SetSpinMax(BellWaiter::kSpinMax);
  session_->Give(std::move(doorbell_));
}

absl::Status DoorbellDecoder::Call(DoorbellCallKind kind) {
  DoorbellCall call = {};
  call.kind = kind;
  return doorbell_->Call(call).status();
}

absl::Status DoorbellDecoder::Next(void* stream) {
  RETURN_IF_ERROR(gpu_->CheckNotCaptured(stream));
  // Attends may have gone to another stream.
  RETURN_IF_ERROR(gpu_->FollowOutputs(stream));
  DoorbellCall call = {};
  call.kind = DoorbellCallKind::kDecoderNext;
  ASSIGN_OR_RETURN(const DoorbellAnswer answer, doorbell_->Call(call));
  version_ = answer.version;
  return absl::OkStatus();
}

absl::Status DoorbellDecoder::Attend(int layer, const StepTensors& tensors, void* stream) {
  RETURN_IF_ERROR(gpu_->CheckNotCaptured(stream));
  const StepLayout layout(shape_, tensors.q_dtype, row_dtype_, tensors.out_dtype);
  const StepTensors shared = layout.At(gpu_->data(), tensors.lse != nullptr);
  RETURN_IF_ERROR(gpu_->PutInputs(RowsOf(shape_, shape_.query_head_count, tensors.q_dtype),
                                  RowsOf(shape_, shape_.kv_head_count, row_dtype_), tensors, shared,
                                  stream));
  const DoorbellCall call = AttendCall(DoorbellCallKind::kDecoderAttend, layer, tensors);
  RETURN_IF_ERROR(doorbell_->Call(call).status());
  return gpu_->TakeOutputs(RowsOf(shape_, shape_.query_head_count, tensors.out_dtype), shared,
                           tensors, stream);
}

absl::Status DoorbellDecoder::Run(StepGraph& graph, void* stream) {
  RETURN_IF_ERROR(gpu_->CheckNotCaptured(stream));
  return RunByPieces(graph, stream, [&](int layer, const StepTensors& tensors) {
    return Attend(layer, tensors, stream);
  });
}

absl::Status DoorbellDecoder::Finish(void* stream) {
  RETURN_IF_ERROR(gpu_->CheckNotCaptured(stream));
  absl::Status status = Call(DoorbellCallKind::kDecoderFinish);
  // The daemon knows when it has written outputs, and not when they were copied from its memory.
  status.Update(gpu_->AwaitOutputs());
  return status;
}

absl::StatusOr<std::string> DoorbellDecoder::Results(int layer) {
  DoorbellCall call = {};
  call.kind = DoorbellCallKind::kDecoderResults;
  call.layer = layer;
  return doorbell_->CallForAll(call);
}

absl::StatusOr<AttendSums> DoorbellDecoder::Sums(int layer) {
  DoorbellCall call = {};
  call.kind = DoorbellCallKind::kDecoderSums;
  call.layer = layer;
  ASSIGN_OR_RETURN(const DoorbellAnswer answer, doorbell_->Call(call));
  AttendSums sums;
  static_assert(std::is_trivially_copyable_v<AttendSums>);
  if (answer.byte_count != static_cast<int64_t>(sizeof(sums))) return NoSense();
  std::memcpy(&sums, doorbell_->data().data(), sizeof(sums));
  return sums;
}

}  // namespace spillway
