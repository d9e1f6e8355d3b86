#pragma once

#include <string_view>

#include "absl/status/status.h"
#include "gpu/device/job_context.h"
#include "gpu/kernels/attend.h"

// Which kernels a sparse attend runs, in which order.
namespace spillway::cuda {

// UNIMPLEMENTED for a policy whose selector, first selection or tail this build
// has no kernels for on a GPU. device: its name, for the message.
absl::Status CheckServed(const Policy& policy, std::string_view device);

// Puts a wave's kernels on the job's stream, each a stage. What is launched
// depends on the wave alone, and nothing waits, so that it can be captured.
// REQUIRES: CheckServed() of its policy.
absl::Status LaunchWave(const Wave& wave, JobContext& context);

}  // namespace spillway::cuda
