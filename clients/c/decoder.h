#pragma once

#include <cstdint>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "daemon/engine/stream_decoder.h"
#include "host/device/step_tensors.h"

namespace spillway {

// A decoder on CUDA streams of an engine, wherever that is. One thread at a time.
class ClientDecoder {
 public:
  virtual ~ClientDecoder() = default;
  // As spillway_decoder_next and so on. Streams: cudaStream_t.
  virtual absl::Status Next(void* stream) = 0;
  // Of the launches of the last step that began.
  virtual uint64_t version() const = 0;
  virtual absl::Status Attend(int layer, const StepTensors& tensors, void* stream) = 0;
  virtual absl::Status Finish(void* stream) = 0;
  virtual absl::StatusOr<std::string> Results(int layer) = 0;
  virtual absl::StatusOr<AttendSums> Sums(int layer) = 0;
  // CUDA's number in this process of the GPU that tensors lie on; -1: the engine's own.
  virtual int gpu() const = 0;
  // The serialised google.rpc.Status of an error that it returned; may be empty.
  virtual std::string DetailsOf(const absl::Status& status) const = 0;
};

}  // namespace spillway
