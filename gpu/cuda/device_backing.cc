#include "gpu/cuda/device_backing.h"

#include <cuda.h>

#include <algorithm>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "gpu/cuda/current_device.h"
#include "gpu/cuda/error.h"
#include "gpu/cuda/stream.h"
#include "host/base/status_macros.h"

namespace spillway::cuda {
namespace {

// The driver's functions, found through the runtime. The program does not link libcuda, so it also
// starts on machines without a driver.
struct Driver {
  decltype(&cuMemAddressReserve) address_reserve = nullptr;
  decltype(&cuMemAddressFree) address_free = nullptr;
  decltype(&cuMemCreate) create = nullptr;
  decltype(&cuMemRelease) release = nullptr;
  decltype(&cuMemMap) map = nullptr;
  decltype(&cuMemUnmap) unmap = nullptr;
  decltype(&cuMemSetAccess) set_access = nullptr;
  decltype(&cuGetErrorString) error_string = nullptr;

  static absl::StatusOr<Driver> Load() {
    Driver d;
    absl::Status status;
    const auto load = [&](const char* name, auto& function) {
      void* entry = nullptr;
      cudaDriverEntryPointQueryResult result = cudaDriverEntryPointSymbolNotFound;
      if (!status.ok()) return;
      status = ToStatus(
          cudaGetDriverEntryPointByVersion(name, &entry, 12000, cudaEnableDefault, &result), name);
      if (status.ok() && (entry == nullptr || result != cudaDriverEntryPointSuccess)) {
        status = absl::UnimplementedError(absl::StrCat("the CUDA driver has no ", name));
      }
      function = reinterpret_cast<std::remove_reference_t<decltype(function)>>(entry);
    };
    load("cuMemAddressReserve", d.address_reserve);
    load("cuMemAddressFree", d.address_free);
    load("cuMemCreate", d.create);
    load("cuMemRelease", d.release);
    load("cuMemMap", d.map);
    load("cuMemUnmap", d.unmap);
    load("cuMemSetAccess", d.set_access);
    load("cuGetErrorString", d.error_string);
    if (!status.ok()) return status;
    return d;
  }

  absl::Status Check(CUresult result, const char* call, int64_t bytes) const {
    if (result == CUDA_SUCCESS) return absl::OkStatus();
    if (result == CUDA_ERROR_OUT_OF_MEMORY) {
      size_t free = 0, total = 0;
      cudaMemGetInfo(&free, &total);
      return MemoryExhausted("GPU memory", bytes, static_cast<int64_t>(free));
    }
    const char* text = nullptr;
    error_string(result, &text);
    return absl::InternalError(
        absl::StrCat(call, " of ", bytes, " bytes: ", text == nullptr ? "unknown error" : text));
  }
};

class DeviceBacking final : public ArenaBacking {
 public:
  DeviceBacking(const Driver& driver, int ordinal, Stream stream, CUdeviceptr range, int64_t bytes)
      : driver_(driver),
        ordinal_(ordinal),
        stream_(std::move(stream)),
        range_(range),
        bytes_(bytes) {}

  ~DeviceBacking() override {
    for (const Extent& extent : extents_) {
      driver_.unmap(extent.at, extent.bytes);
      driver_.release(extent.handle);
    }
    driver_.address_free(range_, static_cast<size_t>(bytes_));
  }

  std::byte* base() const override { return reinterpret_cast<std::byte*>(range_); }

  absl::Status Commit(std::span<const std::span<std::byte>> extents, size_t& done) override {
    const CurrentDevice current(ordinal_);
    RETURN_IF_ERROR(current.status());
    for (done = 0; done < extents.size(); ++done) RETURN_IF_ERROR(Map(extents[done]));
    return absl::OkStatus();
  }

  void Copy(std::byte* to, const std::byte* from, int64_t bytes) override {
    const CurrentDevice current(ordinal_);
    SPILLWAY_CUDA_REPORT(cudaMemcpyAsync(to, from, static_cast<size_t>(bytes),
                                         cudaMemcpyDeviceToDevice, stream_.get()));
    SPILLWAY_CUDA_REPORT(cudaStreamSynchronize(stream_.get()));
  }

 private:
  absl::Status Map(std::span<std::byte> memory) {
    const size_t bytes = memory.size();
    const auto at = reinterpret_cast<CUdeviceptr>(memory.data());
    CUmemAllocationProp properties = {};
    properties.type = CU_MEM_ALLOCATION_TYPE_PINNED;
    properties.location = {CU_MEM_LOCATION_TYPE_DEVICE, {ordinal_}};
    CUmemGenericAllocationHandle handle = 0;
    const auto count = static_cast<int64_t>(bytes);
    absl::Status status =
        driver_.Check(driver_.create(&handle, bytes, &properties, 0), "cuMemCreate", count);
    if (!status.ok()) return status;
    status = driver_.Check(driver_.map(at, bytes, 0, handle, 0), "cuMemMap", count);
    if (status.ok()) {
      CUmemAccessDesc access = {};
      access.location = properties.location;
      access.flags = CU_MEM_ACCESS_FLAGS_PROT_READWRITE;
      status = driver_.Check(driver_.set_access(at, bytes, &access, 1), "cuMemSetAccess", count);
      if (!status.ok()) driver_.unmap(at, bytes);
    }
    if (!status.ok()) {
      driver_.release(handle);
      return status;
    }
    extents_.push_back({at, bytes, handle});
    return absl::OkStatus();
  }

  struct Extent {
    CUdeviceptr at;
    size_t bytes;
    CUmemGenericAllocationHandle handle;
  };

  const Driver driver_;
  const int ordinal_;
  const Stream stream_;
  const CUdeviceptr range_;
  const int64_t bytes_;
  std::vector<Extent> extents_;
};

}  // namespace

absl::StatusOr<std::unique_ptr<ArenaBacking>> CreateDeviceBacking(int ordinal,
                                                                  int64_t limit_bytes) {
  const CurrentDevice current(ordinal);
  RETURN_IF_ERROR(current.status());
  absl::StatusOr<Driver> driver = Driver::Load();
  if (!driver.ok()) return driver.status();
  absl::StatusOr<Stream> stream = Stream::Create();
  if (!stream.ok()) return stream.status();
  const int64_t bytes = (limit_bytes + kSlabBytes - 1) / kSlabBytes * kSlabBytes;
  CUdeviceptr range = 0;
  RETURN_IF_ERROR(
      driver->Check(driver->address_reserve(&range, static_cast<size_t>(bytes), kSlabBytes, 0, 0),
                    "cuMemAddressReserve", bytes));
  return std::make_unique<DeviceBacking>(*driver, ordinal, *std::move(stream), range, bytes);
}

}  // namespace spillway::cuda
