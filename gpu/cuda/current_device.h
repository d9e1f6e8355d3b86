#pragma once

#include "absl/status/status.h"

namespace spillway::cuda {

// Makes a GPU current in the calling thread. The destructor restores what was current before: the
// thread may belong to a program that embeds the engine and uses another GPU, or none, for which no
// context is created.
class CurrentDevice {
 public:
  explicit CurrentDevice(int ordinal);
  ~CurrentDevice();
  CurrentDevice(const CurrentDevice&) = delete;
  CurrentDevice& operator=(const CurrentDevice&) = delete;

  // Whether the GPU could be made current.
  const absl::Status& status() const { return status_; }

 private:
  void* before_ = nullptr;  // CUcontext
  absl::Status status_;
};

}  // namespace spillway::cuda
