// Regions: memory that a daemon on this host shares with this process.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <utility>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "host/base/descriptor.h"
#include "host/device/client_gpu.h"
#include "spillway/v1/memory_service.pb.h"

namespace spillway {

// A region, mapped into this process until this object is destroyed.
class MappedRegion {
 public:
  // descriptor: of the region's file.
  static absl::StatusOr<std::unique_ptr<MappedRegion>> OfHost(const v1::Region& region,
                                                              const Descriptor& descriptor);
  // UNIMPLEMENTED without CUDA; NOT_FOUND if this process does not see the GPU.
  static absl::StatusOr<std::unique_ptr<MappedRegion>> OfGpu(
      const v1::AttachRegionResponse& response);
  ~MappedRegion();
  MappedRegion(const MappedRegion&) = delete;
  MappedRegion& operator=(const MappedRegion&) = delete;

  const std::string& name() const { return name_; }
  void* address() const;
  int64_t byte_count() const { return byte_count_; }
  // CUDA's number of the GPU in this process; -1: host memory.
  int ordinal() const { return gpu_ == nullptr ? -1 : gpu_->ordinal(); }

  // Replaces the shared memory by memory of this process at the same addresses, with the contents
  // of the first kept_bytes, and zeros behind them. On an error it stays shared. GPU memory stays
  // as it is.
  absl::Status Leave(int64_t kept_bytes);

 private:
  MappedRegion(std::string name, int64_t byte_count)
      : name_(std::move(name)), byte_count_(byte_count) {}

  const std::string name_;
  const int64_t byte_count_;
  void* mapped_ = nullptr;          // host memory
  std::unique_ptr<ClientGpu> gpu_;  // null: host memory
};

}  // namespace spillway
