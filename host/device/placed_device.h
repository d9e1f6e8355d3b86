#pragma once

#include <memory>
#include <vector>

#include "host/device/device.h"

namespace spillway {

// One device over several of one kind, such as the GPUs of a machine; over one
// it is that device itself. Thread-safe as every device.
//
// A model is made on every device, or on none. A sequence lives on one device,
// and so do its forks, which share its pages. A job whose sequences live on
// several is split and answered once, when the last part is: device_time_us is
// the longest part's, a stage names its device.
// Parts are submitted one after the other in the caller's thread, so they run
// beside each other where Submit returns before its job is done.
//
// Placement: a new sequence goes where most memory is free (limit - used).
// Appends take memory, the creation of a sequence does not, therefore
// - a sequence without an append yet counts as a share, a 16th of the largest
//   device's limit: sequences made in a burst spread as if they were filled;
// - devices within a share of the freest are equal in memory. Of these the one
//   with the fewest sequences is taken, then the freest, then the first.
// Where that device answers RESOURCE_EXHAUSTED, the others follow by the same
// rule. Devices without memory of their own take turns.
//
// REQUIRES: devices is not empty; their parts() are themselves.
std::unique_ptr<Device> CreatePlacedDevice(std::vector<std::unique_ptr<Device>> devices);

}  // namespace spillway
