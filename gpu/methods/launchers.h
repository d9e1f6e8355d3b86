#pragma once

#include <cuda_runtime_api.h>

#include "gpu/kernels/attend.h"
#include "host/model/model_spec.h"

// Launchers that the registry lists; see gpu/kernels/methods.h.
namespace spillway::cuda {

int HammingBins(const ModelSpec& spec);
cudaError_t LaunchHammingPrepare(const Wave& wave, cudaStream_t stream);
cudaError_t LaunchHammingReference(const Wave& wave, cudaStream_t stream);
cudaError_t LaunchHammingScore(const Wave& wave, cudaStream_t stream);

// Also for Double Sparsity.
cudaError_t LaunchInt4Reference(const Wave& wave, cudaStream_t stream);
cudaError_t LaunchInt4Score(const Wave& wave, cudaStream_t stream);

cudaError_t LaunchQuestReference(const Wave& wave, cudaStream_t stream);
cudaError_t LaunchQuestScore(const Wave& wave, cudaStream_t stream);

cudaError_t LaunchLshSample(const Wave& wave, cudaStream_t stream);
cudaError_t LaunchLshFold(const Wave& wave, cudaStream_t stream);

cudaError_t LaunchFindCandidates(const Wave& wave, cudaStream_t stream);
cudaError_t LaunchDropOthers(const Wave& wave, cudaStream_t stream);

}  // namespace spillway::cuda
