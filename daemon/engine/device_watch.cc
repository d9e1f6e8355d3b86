#include "daemon/engine/device_watch.h"

#include <algorithm>

namespace spillway {

DeviceWatch::DeviceWatch(const Device& device)
    : part_count_(device.parts().size()), parts_(std::make_unique<Part[]>(part_count_)) {
  const std::vector<const Device*> devices = device.parts();
  for (size_t i = 0; i < part_count_; ++i) parts_[i].device = devices[i];
}

void DeviceWatch::Note(const Device& home, const absl::Status& status) {
  const bool failed = absl::IsInternal(status) || absl::IsUnknown(status);
  if (!failed && !status.ok()) return;
  for (size_t i = 0; i < part_count_; ++i) {
    Part& part = parts_[i];
    if (part.device != &home) continue;
    if (failed) {
      part.error_count.fetch_add(1, std::memory_order_relaxed);
      part.failed_in_a_row.fetch_add(1, std::memory_order_relaxed);
    } else if (part.failed_in_a_row.load(std::memory_order_relaxed) != 0) {
      part.failed_in_a_row.store(0, std::memory_order_relaxed);
    }
  }
}

std::vector<DeviceWatch::State> DeviceWatch::states() const {
  std::vector<State> states;
  for (size_t i = 0; i < part_count_; ++i) {
    const Part& part = parts_[i];
    states.push_back({part.device->info().name, part.error_count.load(std::memory_order_relaxed),
                      part.failed_in_a_row.load(std::memory_order_relaxed) >= kLostAfter});
  }
  return states;
}

bool DeviceWatch::all_lost() const {
  const std::vector<State> all = states();
  return std::all_of(all.begin(), all.end(), [](const State& state) { return state.lost; });
}

}  // namespace spillway
