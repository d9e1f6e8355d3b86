#pragma once

#include <string_view>

#include "absl/status/status.h"
#include "gpu/device/job_context.h"
#include "gpu/kernels/attend.h"

// Which kernels a sparse attend runs, in which order.
namespace spillway::cuda {

// UNIMPLEMENTED if this build has no GPU kernels for the policy's selector, first selection or
// tail. device: its name, for the message.
absl::Status CheckServed(const Policy& policy, std::string_view device);

// Puts a wave's kernels on the job's stream; each is a stage. The launches depend only on the wave,
// and nothing waits, so they can be captured. scored: recorded when the tokens have scores; may be
// null. REQUIRES: CheckServed() of its policy.
absl::Status LaunchWave(const Wave& wave, JobContext& context, cudaEvent_t scored = nullptr);

}  // namespace spillway::cuda
