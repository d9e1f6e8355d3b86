#pragma once

#include <optional>

#include "absl/status/status.h"

namespace spillway::cuda {

// Makes a GPU current in the calling thread, and sets the thread's stream capture mode to relaxed:
// while the program captures a graph in the global mode, which is torch's default, other threads
// may not query streams or register memory in another mode, and the capture fails if they do. The
// destructor restores what was before: the thread may belong to a program that embeds the engine
// and uses another GPU, or none, for which no context is created.
class CurrentDevice {
 public:
  explicit CurrentDevice(int ordinal);
  ~CurrentDevice();
  CurrentDevice(const CurrentDevice&) = delete;
  CurrentDevice& operator=(const CurrentDevice&) = delete;

  // Whether the GPU could be made current.
  const absl::Status& status() const { return status_; }

 private:
  void* before_ = nullptr;   // CUcontext
  std::optional<int> mode_;  // cudaStreamCaptureMode; empty: not changed
  absl::Status status_;
};

}  // namespace spillway::cuda
