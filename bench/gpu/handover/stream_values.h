#pragma once

#include <cuda.h>
#include <cuda_runtime_api.h>

#include <cstdint>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

namespace spillway::bench {

// Stream memory operations of 32 bits. The driver's functions are asked for by
// name, so that the program starts on machines without one. The version that is
// asked for needs no option of the driver.
class StreamValues {
 public:
  static absl::StatusOr<StreamValues> Load();

  // When the stream gets there, writes the value; what the stream did before is
  // visible before it.
  absl::Status Write(cudaStream_t stream, uint32_t* word, uint32_t value) const;
  // Holds the stream until the word has reached the value (see Reached). Without
  // a time-out.
  absl::Status WaitUntilReached(cudaStream_t stream, uint32_t* word, uint32_t value) const;

 private:
  absl::Status Check(CUresult result, const char* call) const;

  decltype(&cuStreamWriteValue32) write_ = nullptr;
  decltype(&cuStreamWaitValue32) wait_ = nullptr;
  decltype(&cuGetErrorName) error_name_ = nullptr;
};

}  // namespace spillway::bench
