#pragma once

#include <memory>

#include "absl/status/statusor.h"
#include "gpu/device/job_context.h"
#include "gpu/device/step_resources.h"
#include "host/device/stream_step.h"
#include "tbb/task_arena.h"

namespace spillway::cuda {

// What a step on one GPU uses; all of it must outlive the step.
struct StreamStepHome {
  int ordinal = 0;
  Gpu gpu;
  Device* device = nullptr;  // for jobs that index existing rows
  CudaModel* model = nullptr;
  StepResourcePool* resources = nullptr;
  int64_t workspace_bytes = 0;         // most for the units that run at a time
  bool reproducible = false;           // see CudaDeviceOptions
  tbb::task_arena* workers = nullptr;  // the device's threads
};

// RESOURCE_EXHAUSTED; UNIMPLEMENTED for a policy or a model with optional methods, which read
// queries on the host.
absl::StatusOr<std::unique_ptr<StreamStep>> CreateStreamStep(const StreamStepHome& home,
                                                             StreamStepOptions options);

}  // namespace spillway::cuda
