#include "lib/region.h"

#include <sys/mman.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <utility>

#include "absl/strings/str_cat.h"
#include "host/base/status_macros.h"
#include "lib/gpu.h"

namespace spillway {
namespace {

constexpr int kReadWrite = PROT_READ | PROT_WRITE;

absl::Status CannotMap(int64_t byte_count, const std::string& name) {
  return absl::ResourceExhaustedError(
      absl::StrCat("mapping ", byte_count, " bytes of ", name, ": ", std::strerror(errno)));
}

}  // namespace

absl::StatusOr<std::unique_ptr<MappedRegion>> MappedRegion::OfHost(const v1::Region& region,
                                                                   const Descriptor& descriptor) {
  std::unique_ptr<MappedRegion> made(new MappedRegion(region.name(), region.byte_count()));
  void* const mapped = mmap(nullptr, static_cast<size_t>(region.byte_count()), kReadWrite,
                            MAP_SHARED, descriptor.get(), 0);
  if (mapped == MAP_FAILED) return CannotMap(region.byte_count(), region.name());
  made->mapped_ = mapped;
  return made;
}

absl::StatusOr<std::unique_ptr<MappedRegion>> MappedRegion::OfGpu(
    const v1::AttachRegionResponse& response) {
  const v1::Region& region = response.region();
  std::unique_ptr<MappedRegion> made(new MappedRegion(region.name(), region.byte_count()));
  ASSIGN_OR_RETURN(made->gpu_, MapGpuMemory(region.device(), response.ipc_handle()));
  return made;
}

MappedRegion::~MappedRegion() {
  if (mapped_ != nullptr) munmap(mapped_, static_cast<size_t>(byte_count_));
}

void* MappedRegion::address() const { return gpu_ == nullptr ? mapped_ : gpu_->data(); }

absl::Status MappedRegion::Leave(int64_t kept_bytes) {
  if (gpu_ != nullptr) return absl::OkStatus();
  const auto size = static_cast<size_t>(byte_count_);
  void* const own = mmap(nullptr, size, kReadWrite, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (own == MAP_FAILED) return CannotMap(byte_count_, "memory of this process");
  std::memcpy(own, mapped_, static_cast<size_t>(std::clamp(kept_bytes, int64_t{0}, byte_count_)));
  if (mremap(own, size, size, MREMAP_MAYMOVE | MREMAP_FIXED, mapped_) != MAP_FAILED) {
    return absl::OkStatus();
  }
  absl::Status status = CannotMap(byte_count_, name_);
  munmap(own, size);
  return status;
}

}  // namespace spillway
