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

// Counts the internal errors of each device, and finds the devices that only fail. Thread-safe.
// While a device has no errors, Note() only reads one counter.
class DeviceWatch {
 public:
  // A part of the device that was found to be unusable.
  struct Loss {
    std::string name;
    std::string why;
    std::vector<std::string> parts;  // names of all parts
  };
  // Called once for each lost part, by the thread that finds the loss, before the operation of this
  // thread is answered. Other threads that find a loss wait until it returns.
  using OnLost = std::function<void(const Loss& loss)>;

  // The device must outlive this. on_lost may be null.
  explicit DeviceWatch(const Device& device, OnLost on_lost = nullptr);

  // Called when an item of a job has ended on `home`, a part of the device.
  void Note(const Device& home, const absl::Status& status);
  // Checks whether every part is usable.
  void Check();

  struct State {
    std::string name;
    int64_t error_count = 0;
    // The part is unusable, or its last items (kLostAfter) all failed.
    bool lost = false;
    // Why it is unusable, which it stays until the process ends; empty if it is usable.
    std::string why;
  };
  // One for each part.
  std::vector<State> states() const;
  // Whether all parts are lost.
  bool all_lost() const;

 private:
  // Failed items in a row: a single item may fail because of a bug that the next one does not hit.
  static constexpr int64_t kLostAfter = 3;
  struct Part {
    const Device* device = nullptr;
    std::atomic<int64_t> error_count{0};
    std::atomic<int64_t> failed_in_a_row{0};
    std::string why;  // why it is unusable; written at most once, under the mutex
  };

  void Check(Part& part) ABSL_LOCKS_EXCLUDED(mutex_);

  const size_t part_count_;
  const std::unique_ptr<Part[]> parts_;
  const OnLost on_lost_;
  mutable Mutex mutex_;
};

}  // namespace spillway
