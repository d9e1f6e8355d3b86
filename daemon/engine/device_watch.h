#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "host/device/device.h"

namespace spillway {

// Counts what devices fail with by their own fault, and knows those that do nothing else any
// more. Thread-safe; a device that never failed costs one look at a counter.
class DeviceWatch {
 public:
  // The device outlives this.
  explicit DeviceWatch(const Device& device);

  // An item of a job has ended on `home`, a part of the device.
  void Note(const Device& home, const absl::Status& status);

  struct State {
    std::string name;
    int64_t error_count = 0;
    // Its last items all failed.
    bool lost = false;
  };
  // Of every part.
  std::vector<State> states() const;
  // Whether no part does anything but fail any more.
  bool all_lost() const;

 private:
  // Items in a row: one may fail by a fault of ours that the next does not meet.
  static constexpr int64_t kLostAfter = 3;
  struct Part {
    const Device* device = nullptr;
    std::atomic<int64_t> error_count{0};
    std::atomic<int64_t> failed_in_a_row{0};
  };

  const size_t part_count_;
  const std::unique_ptr<Part[]> parts_;
};

}  // namespace spillway
