#pragma once

#include <cuda_runtime_api.h>

#include "gpu/kernels/attend.h"

// Launchers of the core's selectors; see SelectorKernels. `oracle` prepares with
// LaunchClearUnits().
namespace spillway::cuda {

cudaError_t LaunchAsymmetricPrepare(const Wave& wave, cudaStream_t stream);
cudaError_t LaunchAsymmetricReference(const Wave& wave, cudaStream_t stream);
cudaError_t LaunchAsymmetricScore(const Wave& wave, cudaStream_t stream);
cudaError_t LaunchExactReference(const Wave& wave, cudaStream_t stream);
cudaError_t LaunchExactScore(const Wave& wave, cudaStream_t stream);

}  // namespace spillway::cuda
