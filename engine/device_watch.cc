#include "engine/device_watch.h"

#include <algorithm>
#include <utility>

namespace spillway {

DeviceWatch::DeviceWatch(const Device& device, OnLost on_lost)
    : part_count_(device.parts().size()),
      parts_(std::make_unique<Part[]>(part_count_)),
      on_lost_(std::move(on_lost)) {
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
      Check(part);
    } else if (part.failed_in_a_row.load(std::memory_order_relaxed) != 0) {
      part.failed_in_a_row.store(0, std::memory_order_relaxed);
    }
  }
}

void DeviceWatch::Check() {
  for (size_t i = 0; i < part_count_; ++i) Check(parts_[i]);
}

void DeviceWatch::Check(Part& part) {
  const absl::Status usable = part.device->CheckUsable();
  if (usable.ok()) return;
  const MutexLock lock(mutex_);
  if (!part.why.empty()) return;
  part.why = std::string(usable.message());
  if (!on_lost_) return;
  Loss loss{part.device->info().name, part.why, {}};
  for (size_t i = 0; i < part_count_; ++i) loss.parts.push_back(parts_[i].device->info().name);
  on_lost_(loss);
}

std::vector<DeviceWatch::State> DeviceWatch::states() const {
  std::vector<State> states;
  const MutexLock lock(mutex_);
  for (size_t i = 0; i < part_count_; ++i) {
    const Part& part = parts_[i];
    const bool only_fails = part.failed_in_a_row.load(std::memory_order_relaxed) >= kLostAfter;
    states.push_back({part.device->info().name, part.error_count.load(std::memory_order_relaxed),
                      only_fails || !part.why.empty(), part.why});
  }
  return states;
}

bool DeviceWatch::all_lost() const {
  const std::vector<State> all = states();
  return std::all_of(all.begin(), all.end(), [](const State& state) { return state.lost; });
}

}  // namespace spillway
