#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>

#include "absl/status/status.h"

namespace spillway {

class Device;
class DeviceSequence;

// Memory of a device's own that another process of this host can map too, and may write
// to at any time. Zeroed at first. It is freed when this goes and what the device was
// asked to do with it is done; who gives it up does not wait for that. Thread-safe.
class SharedDeviceMemory {
 public:
  // Sizes are multiples of this: a handle opens all that shares such a piece.
  static constexpr int64_t kGranule = int64_t{2} << 20;

  virtual ~SharedDeviceMemory() = default;
  SharedDeviceMemory(const SharedDeviceMemory&) = delete;
  SharedDeviceMemory& operator=(const SharedDeviceMemory&) = delete;

  // The device that it is of, which is one of Device::parts() of the one that gave it.
  virtual const Device& device() const = 0;
  // Addresses of the device: the host cannot read there.
  virtual std::span<std::byte> bytes() const = 0;
  // What the other process maps it by.
  virtual const std::string& handle() const = 0;

  // Copies rows of row_bytes, `stride` bytes apart there, to rows side by side in host
  // memory, and waits. REQUIRES: they lie in bytes().
  virtual absl::Status Read(const std::byte* from, int64_t stride, int64_t row_bytes,
                            int64_t row_count, std::byte* to) = 0;
  // Copies host memory there, and waits. REQUIRES: it fits.
  virtual absl::Status Write(std::byte* to, const std::byte* from, int64_t bytes) = 0;

 protected:
  SharedDeviceMemory() = default;
};

// How one other process has a device serve it: tensors that both see, a copy of its inputs
// that it cannot change, and a stream. One thread at a time.
class DeviceExchange {
 public:
  // Waits for the stream.
  virtual ~DeviceExchange() = default;
  DeviceExchange(const DeviceExchange&) = delete;
  DeviceExchange& operator=(const DeviceExchange&) = delete;

  virtual const SharedDeviceMemory& shared() const = 0;
  // The device's handle of it (cudaStream_t).
  virtual void* stream() const = 0;
  // Where inputs are copied to, in the device's memory.
  virtual std::byte* inputs() const = 0;
  // Enqueues a copy of the first `bytes` of shared() to inputs(), which hold them.
  virtual absl::Status TakeInputs(int64_t bytes) = 0;
  // Waits for all that is on the stream, busily for a while.
  virtual absl::Status Await() = 0;

 protected:
  DeviceExchange() = default;
};

}  // namespace spillway
