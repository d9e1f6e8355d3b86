#pragma once

#include <cstdint>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "engine/stream_decoder.h"
#include "host/device/step_graph.h"
#include "host/device/step_tensors.h"

namespace spillway {

// A decoder on CUDA streams, of an embedded engine or a daemon. Only one thread at a time may use
// it.
class ClientDecoder {
 public:
  virtual ~ClientDecoder() = default;
  // Next, Attend, Run, Finish, Results and Sums behave as spillway_decoder_next and so on. Streams
  // are of type cudaStream_t.
  virtual absl::Status Next(void* stream) = 0;
  // Version of the kernel launches of the last step that began.
  virtual uint64_t version() const = 0;
  virtual absl::Status Attend(int layer, const StepTensors& tensors, void* stream) = 0;
  virtual absl::Status Run(StepGraph& graph, void* stream) = 0;
  virtual absl::Status Finish(void* stream) = 0;
  virtual absl::StatusOr<std::string> Results(int layer) = 0;
  virtual absl::StatusOr<AttendSums> Sums(int layer) = 0;
  // CUDA's number, in this process, of the GPU that the tensors must be on; -1 for an embedded
  // engine.
  virtual int gpu() const = 0;
  // The serialised google.rpc.Status of an error that this decoder returned; may be empty.
  virtual std::string DetailsOf(const absl::Status& status) const = 0;
};

}  // namespace spillway
