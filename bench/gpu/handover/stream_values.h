#pragma once

#include <cuda.h>
#include <cuda_runtime_api.h>

#include <cstdint>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

namespace spillway::bench {

// Stream memory operations of 32 bits. The driver's functions are looked up by name, so that the
// program also starts on machines without a driver. The version that is looked up works without a
// driver option.
class StreamValues {
 public:
  static absl::StatusOr<StreamValues> Load();

  // Queues a write of the value. All earlier work of the stream is visible before the value is.
  absl::Status Write(cudaStream_t stream, uint32_t* word, uint32_t value) const;
  // Holds the stream until the word has reached the value (see Reached). There is no time limit.
  absl::Status WaitUntilReached(cudaStream_t stream, uint32_t* word, uint32_t value) const;

 private:
  absl::Status Check(CUresult result, const char* call) const;

  decltype(&cuStreamWriteValue32) write_ = nullptr;
  decltype(&cuStreamWaitValue32) wait_ = nullptr;
  decltype(&cuGetErrorName) error_name_ = nullptr;
};

}  // namespace spillway::bench
