#include "gpu/client/client_gpu.h"

#include <cuda_runtime_api.h>

#include <chrono>
#include <cstdint>
#include <cstring>
#include <utility>

#include "absl/strings/str_cat.h"
#include "gpu/cuda/current_device.h"
#include "gpu/cuda/error.h"
#include "gpu/cuda/graph.h"
#include "gpu/cuda/poll.h"
#include "gpu/cuda/stream.h"
#include "gpu/device/cuda_device.h"
#include "gpu/device/step_checks.h"
#include "gpu/kernels/step_copy.h"
#include "host/base/status_macros.h"

namespace spillway {
namespace {

using cuda::CurrentDevice;
using cuda::Event;

// How long a wait for the caller's kernels polls without sleeping.
constexpr std::chrono::microseconds kBusy{500};

class CudaClientGpu final : public ClientGpu {
 public:
  CudaClientGpu(int ordinal, std::byte* data, Event put, Event taken)
      : ordinal_(ordinal), data_(data), put_(std::move(put)), taken_(std::move(taken)) {}
  ~CudaClientGpu() override {
    const CurrentDevice current(ordinal_);
    // Kernels of the caller may still use the memory.
    SPILLWAY_CUDA_REPORT(cudaDeviceSynchronize());
    SPILLWAY_CUDA_REPORT(cudaIpcCloseMemHandle(data_));
    put_ = Event();
    taken_ = Event();
  }

  std::byte* data() const override { return data_; }
  int ordinal() const override { return ordinal_; }

  absl::Status CheckNotCaptured(void* stream) const override {
    const CurrentDevice current(ordinal_);
    RETURN_IF_ERROR(current.status());
    ASSIGN_OR_RETURN(const bool captured, cuda::IsCaptured(static_cast<cudaStream_t>(stream)));
    if (!captured) return absl::OkStatus();
    return absl::FailedPreconditionError(
        "the stream is being captured: attends of a daemon are calls, which a graph cannot "
        "contain; those of an embedded engine can be captured");
  }

  absl::Status PutInputs(const StepRows& q_rows, const StepRows& kv_rows,
                         const StepTensors& tensors, const StepTensors& shared, void* on) override {
    const CurrentDevice current(ordinal_);
    RETURN_IF_ERROR(current.status());
    auto* const stream = static_cast<cudaStream_t>(on);
    RETURN_IF_ERROR(cuda::CheckStepTensors(ordinal_, tensors));
    cuda::StepCopy copy;
    copy.sequence_count = static_cast<int32_t>(q_rows.sequence_count);
    copy.token_count = static_cast<int32_t>(q_rows.token_count);
    Add(q_rows, tensors.q, shared.q, copy);
    Add(kv_rows, tensors.k, shared.k, copy);
    Add(kv_rows, tensors.v, shared.v, copy);
    // Outputs of the layer before may still be copied, on another stream.
    SPILLWAY_CUDA_RETURN_IF_ERROR(cudaStreamWaitEvent(stream, taken_.get()));
    SPILLWAY_CUDA_RETURN_IF_ERROR(cuda::LaunchStepCopy(copy, stream));
    SPILLWAY_CUDA_RETURN_IF_ERROR(cudaEventRecord(put_.get(), stream));
    return cuda::ToStatus(cuda::Poll([this] { return cudaEventQuery(put_.get()); }, kBusy, [] {}),
                          "the caller's stream");
  }

  absl::Status TakeOutputs(const StepRows& out_rows, const StepTensors& shared,
                           const StepTensors& tensors, void* on) override {
    const CurrentDevice current(ordinal_);
    RETURN_IF_ERROR(current.status());
    auto* const stream = static_cast<cudaStream_t>(on);
    cuda::StepCopy copy;
    copy.sequence_count = static_cast<int32_t>(out_rows.sequence_count);
    copy.token_count = static_cast<int32_t>(out_rows.token_count);
    Add(out_rows, shared.out, tensors.out, copy);
    if (tensors.lse != nullptr) {
      // On both sides, the heads of a token are contiguous.
      const int64_t token = out_rows.head_count * int64_t{sizeof(float)};
      const StepRows rows = {out_rows.sequence_count, out_rows.token_count, 1, token};
      const int64_t sequence = out_rows.token_count * token;
      const StepPlace<const std::byte> from = {reinterpret_cast<const std::byte*>(shared.lse),
                                               sequence, token, token};
      const StepPlace<const std::byte> to = {reinterpret_cast<const std::byte*>(tensors.lse),
                                             sequence, token, token};
      Add(rows, from, to, copy);
    }
    SPILLWAY_CUDA_RETURN_IF_ERROR(cuda::LaunchStepCopy(copy, stream));
    return cuda::ToStatus(cudaEventRecord(taken_.get(), stream), "cudaEventRecord");
  }

  absl::Status FollowOutputs(void* on) override {
    const CurrentDevice current(ordinal_);
    RETURN_IF_ERROR(current.status());
    return cuda::ToStatus(cudaStreamWaitEvent(static_cast<cudaStream_t>(on), taken_.get()),
                          "cudaStreamWaitEvent");
  }

  absl::Status AwaitOutputs() override {
    const CurrentDevice current(ordinal_);
    RETURN_IF_ERROR(current.status());
    return cuda::ToStatus(cuda::Poll([this] { return cudaEventQuery(taken_.get()); }, kBusy, [] {}),
                          "the caller's stream");
  }

 private:
  static void Add(const StepRows& rows, const StepPlace<const std::byte>& from,
                  const StepPlace<const std::byte>& to, cuda::StepCopy& copy) {
    cuda::TensorCopy& tensor = copy.tensors[copy.tensor_count++];
    tensor.from = from.data;
    tensor.from_strides = {from.sequence_stride, from.token_stride, from.head_stride};
    tensor.to = const_cast<std::byte*>(to.data);
    tensor.to_strides = {to.sequence_stride, to.token_stride, to.head_stride};
    tensor.head_count = static_cast<int32_t>(rows.head_count);
    tensor.bytes = static_cast<int32_t>(rows.bytes);
  }

  const int ordinal_;
  std::byte* const data_;
  Event put_, taken_;
};

}  // namespace

absl::StatusOr<std::unique_ptr<ClientGpu>> CreateClientGpu(const std::string& uuid,
                                                           std::string_view handle) {
  cudaIpcMemHandle_t opened;
  if (handle.size() != sizeof(opened)) {
    return absl::InvalidArgumentError(absl::StrCat("the handle has ", handle.size(), " bytes, not ",
                                                   sizeof(opened), " as CUDA's have"));
  }
  std::memcpy(&opened, handle.data(), sizeof(opened));
  for (const CudaDeviceInfo& gpu : ListCudaDevices()) {
    if (gpu.uuid != uuid) continue;
    const CurrentDevice current(gpu.ordinal);
    RETURN_IF_ERROR(current.status());
    ASSIGN_OR_RETURN(Event put, Event::Create(/*timing=*/false));
    ASSIGN_OR_RETURN(Event taken, Event::Create(/*timing=*/false));
    void* data = nullptr;
    if (const cudaError_t error =
            cudaIpcOpenMemHandle(&data, opened, cudaIpcMemLazyEnablePeerAccess);
        error != cudaSuccess) {
      const absl::Status status = cuda::ToStatus(error, "cudaIpcOpenMemHandle");
      return absl::UnimplementedError(
          absl::StrCat("this process cannot map memory of the daemon's cuda:", gpu.ordinal, ": ",
                       std::string(status.message())));
    }
    return std::make_unique<CudaClientGpu>(gpu.ordinal, static_cast<std::byte*>(data),
                                           std::move(put), std::move(taken));
  }
  return absl::NotFoundError(absl::StrCat("this process does not see the daemon's ", uuid,
                                          ": CUDA_VISIBLE_DEVICES or the driver hides it"));
}

}  // namespace spillway
