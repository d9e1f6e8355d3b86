#pragma once

#include "absl/status/status.h"

namespace spillway::cuda {

// Makes a GPU the calling thread's while it lives. The thread may be one of a
// program that embeds the engine and works on another GPU, or on none: then it
// has none again, and none is woken for it.
class CurrentDevice {
 public:
  explicit CurrentDevice(int ordinal);
  ~CurrentDevice();
  CurrentDevice(const CurrentDevice&) = delete;
  CurrentDevice& operator=(const CurrentDevice&) = delete;

  // Whether it could be made so.
  const absl::Status& status() const { return status_; }

 private:
  void* before_ = nullptr;  // CUcontext
  absl::Status status_;
};

}  // namespace spillway::cuda
