#pragma once

#include <cstddef>

#include "absl/status/status.h"
#include "host/device/step_tensors.h"

namespace spillway {

// A GPU's memory that a daemon shares with this process, mapped here, and how a client
// brings tensors of its own there and back, on its own streams (cudaStream_t). One thread
// at a time.
class ClientGpu {
 public:
  // Waits for the GPU, and unmaps it.
  virtual ~ClientGpu() = default;
  ClientGpu(const ClientGpu&) = delete;
  ClientGpu& operator=(const ClientGpu&) = delete;

  // An address of this process's CUDA.
  virtual std::byte* data() const = 0;
  // CUDA's number of the GPU in this process.
  virtual int ordinal() const = 0;

  // FAILED_PRECONDITION for a stream that is being captured.
  virtual absl::Status CheckNotCaptured(void* stream) const = 0;
  // Copies q, k and v to those of `shared`, behind what is on the stream, and waits until
  // they are there. INVALID_ARGUMENT names a tensor, of outputs too, that is not in the
  // GPU's memory, or of inputs one whose rows are not aligned to 16 bytes. q_rows and
  // kv_rows: of q, and of k and v.
  virtual absl::Status PutInputs(const StepRows& q_rows, const StepRows& kv_rows,
                                 const StepTensors& tensors, const StepTensors& shared,
                                 void* stream) = 0;
  // Enqueues the copies of out and, unless it is null, lse.
  virtual absl::Status TakeOutputs(const StepRows& out_rows, const StepTensors& shared,
                                   const StepTensors& tensors, void* stream) = 0;

 protected:
  ClientGpu() = default;
};

}  // namespace spillway
