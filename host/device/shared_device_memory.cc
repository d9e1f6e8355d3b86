#include "host/device/shared_device_memory.h"

#include <string>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "host/device/device.h"

namespace spillway {

absl::StatusOr<std::unique_ptr<SharedDeviceMemory>> Device::AllocateShared(std::string_view device,
                                                                           int64_t) {
  for (const Device* part : parts()) {
    if (!part->info().Is(device)) continue;
    return absl::InvalidArgumentError(absl::StrCat(
        std::string(device), " has no memory of its own: only GPU memory can be shared this way"));
  }
  return absl::InvalidArgumentError(
      absl::StrCat("value ", std::string(device), " is not a device of the engine, which has: ",
                   absl::StrJoin(parts(), ", ", [](std::string* out, const Device* part) {
                     absl::StrAppend(out, part->info().name);
                     if (!part->info().uuid.empty())
                       absl::StrAppend(out, " (", part->info().uuid, ")");
                   })));
}

absl::StatusOr<std::unique_ptr<DeviceExchange>> Device::OpenExchange(int64_t, int64_t) {
  return absl::UnimplementedError(
      absl::StrCat(info().name, " has no memory of its own that another process could map"));
}

}  // namespace spillway
