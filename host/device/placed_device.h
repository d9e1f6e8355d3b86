#pragma once

#include <memory>
#include <vector>

#include "host/device/device.h"

namespace spillway {

// One device that stands for several of one kind, such as the GPUs of a machine. Over a single
// device, it is that device itself. Thread-safe like every device.
//
// A model is created on every device, or on none. A sequence lives on one device, and so do its
// forks, which share its pages. A job whose sequences live on several devices is split, and
// completes once, when its last part does. Then device_time_us is that of the longest part, and
// each stage names its device. Parts are submitted one after the other in the caller's thread. So
// they run at the same time only if Submit() returns before its job is done.
//
// Placement: a new sequence goes to the device with the most free memory (limit - used). Appends
// take memory, but creating a sequence takes none. Therefore
// - a sequence without an append counts as one share, which is a 16th of the largest device's
//   limit. So sequences that are created in a burst spread as if they were filled;
// - devices within one share of the largest free memory count as equal. Of these, the one with the
//   fewest sequences is taken, then the one with the most free memory, then the first.
// If that device answers RESOURCE_EXHAUSTED, the others are tried by the same rule. Devices without
// memory of their own take turns.
//
// REQUIRES: devices is not empty, and none of them stands for others.
std::unique_ptr<Device> CreatePlacedDevice(std::vector<std::unique_ptr<Device>> devices);

}  // namespace spillway
