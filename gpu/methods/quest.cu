#include "gpu/kernels/score_launch.cuh"
#include "gpu/methods/launchers.h"
#include "gpu/methods/quest.cuh"
#include "gpu/methods/request.h"

namespace spillway::cuda {
namespace {

BoundEstimates::Context ContextOf(const Wave& wave) {
  const MethodShape& methods = *wave.methods.shape;
  return {methods.sections.bound_pages, methods.section_offset + methods.sections.bounds()};
}

}  // namespace

cudaError_t LaunchQuestReference(const Wave& wave, cudaStream_t stream) {
  return LaunchLogitReference<BoundEstimates>(wave, ContextOf(wave), stream);
}

cudaError_t LaunchQuestScore(const Wave& wave, cudaStream_t stream) {
  return LaunchLogitScore<BoundEstimates>(wave, ContextOf(wave), stream);
}

}  // namespace spillway::cuda
