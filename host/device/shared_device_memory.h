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

// Memory of a device that another process of this host can map too, and may write to at any time.
// Zeroed at first. It is freed after this object is destroyed and the device has finished its work
// with it; the destructor does not wait for that. Thread-safe.
class SharedDeviceMemory {
 public:
  // Sizes are multiples of this, because a handle gives access to all that shares such a piece.
  static constexpr int64_t kGranule = int64_t{2} << 20;

  virtual ~SharedDeviceMemory() = default;
  SharedDeviceMemory(const SharedDeviceMemory&) = delete;
  SharedDeviceMemory& operator=(const SharedDeviceMemory&) = delete;

  // The device that has this memory: one of the parts() of the device that allocated it.
  virtual const Device& device() const = 0;
  // Addresses on the device; the host cannot read there.
  virtual std::span<std::byte> bytes() const = 0;
  // The handle with which the other process maps the memory.
  virtual const std::string& handle() const = 0;

  // Copies row_count rows of row_bytes, which are `stride` bytes apart in this memory, to adjacent
  // rows in host memory, and waits. REQUIRES: the rows are in bytes().
  virtual absl::Status Read(const std::byte* from, int64_t stride, int64_t row_bytes,
                            int64_t row_count, std::byte* to) = 0;
  // Copies host memory to `to` in this memory, and waits. REQUIRES: it fits.
  virtual absl::Status Write(std::byte* to, const std::byte* from, int64_t bytes) = 0;

 protected:
  SharedDeviceMemory() = default;
};

// What a device needs to serve one other process: memory for tensors that both see, a copy of the
// inputs that the other process cannot change, and a stream. One thread at a time.
class DeviceExchange {
 public:
  // Waits for the stream.
  virtual ~DeviceExchange() = default;
  DeviceExchange(const DeviceExchange&) = delete;
  DeviceExchange& operator=(const DeviceExchange&) = delete;

  virtual const SharedDeviceMemory& shared() const = 0;
  // The device's handle of the stream (cudaStream_t).
  virtual void* stream() const = 0;
  // The memory of the device that inputs are copied to.
  virtual std::byte* inputs() const = 0;
  // Enqueues a copy of the first `bytes` of shared() to inputs(). REQUIRES: they fit.
  virtual absl::Status TakeInputs(int64_t bytes) = 0;
  // Waits for all work on the stream, and polls at first.
  virtual absl::Status Await() = 0;

 protected:
  DeviceExchange() = default;
};

}  // namespace spillway
