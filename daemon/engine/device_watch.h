#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "host/base/mutex.h"
#include "host/device/device.h"

namespace spillway {

// Counts what devices fail with by their own fault, and knows those that do nothing else any
// more. Thread-safe; a device that never failed costs one look at a counter.
class DeviceWatch {
 public:
  // A part that is found to be unusable.
  struct Loss {
    std::string name;
    std::string why;
    std::vector<std::string> parts;  // the names of all
  };
  // Called once for each, by the thread that finds it and before what it does is answered; others
  // that find one wait until it returns.
  using OnLost = std::function<void(const Loss& loss)>;

  // The device outlives this. on_lost may be null.
  explicit DeviceWatch(const Device& device, OnLost on_lost = nullptr);

  // An item of a job has ended on `home`, a part of the device.
  void Note(const Device& home, const absl::Status& status);
  // Asks every part whether it is usable.
  void Check();

  struct State {
    std::string name;
    int64_t error_count = 0;
    // It is unusable, or its last items all failed.
    bool lost = false;
    // Why, where it is unusable: that is so until the process ends.
    std::string why;
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
    std::string why;  // it is unusable; written once, under the mutex
  };

  void Check(Part& part) ABSL_LOCKS_EXCLUDED(mutex_);

  const size_t part_count_;
  const std::unique_ptr<Part[]> parts_;
  const OnLost on_lost_;
  mutable Mutex mutex_;
};

}  // namespace spillway
