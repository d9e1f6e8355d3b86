#pragma once

#include <cstddef>

#include "absl/status/status.h"
#include "host/device/step_tensors.h"

namespace spillway {

// A client's mapping of GPU memory that a daemon shares with this process. Copies the client's own
// tensors to that memory and back, on the client's streams (cudaStream_t). One thread at a time.
class ClientGpu {
 public:
  // Waits for the GPU, and unmaps the memory.
  virtual ~ClientGpu() = default;
  ClientGpu(const ClientGpu&) = delete;
  ClientGpu& operator=(const ClientGpu&) = delete;

  // The address of the mapped memory for CUDA in this process.
  virtual std::byte* data() const = 0;
  // CUDA's ordinal of the GPU in this process.
  virtual int ordinal() const = 0;

  // FAILED_PRECONDITION if the stream is being captured.
  virtual absl::Status CheckNotCaptured(void* stream) const = 0;
  // Copies q, k and v to those of `shared`, after the work that is already on the stream, and waits
  // for the copies. INVALID_ARGUMENT names an input or output that is not in the GPU's memory, or
  // an input whose rows are not aligned to 16 bytes. q_rows is the shape of q, kv_rows that of k
  // and of v.
  virtual absl::Status PutInputs(const StepRows& q_rows, const StepRows& kv_rows,
                                 const StepTensors& tensors, const StepTensors& shared,
                                 void* stream) = 0;
  // Enqueues the copies of out and, if tensors.lse is not null, of lse.
  virtual absl::Status TakeOutputs(const StepRows& out_rows, const StepTensors& shared,
                                   const StepTensors& tensors, void* stream) = 0;
  // What comes on the stream from now on comes after the outputs that were taken on any stream.
  virtual absl::Status FollowOutputs(void* stream) = 0;
  // Waits for these outputs.
  virtual absl::Status AwaitOutputs() = 0;

 protected:
  ClientGpu() = default;
};

}  // namespace spillway
