#include "gpu/kernels/score_launch.cuh"
#include "gpu/methods/launchers.h"
#include "gpu/methods/sketch.cuh"

namespace spillway::cuda {
namespace {

// The same context for any number of query heads.
template <int kRows>
typename SketchEstimates<kRows>::Context ContextOf(const Wave& wave) {
  const MethodShape& methods = *wave.methods.shape;
  const KeySections& sections = methods.sections;
  if (wave.shape.selector == Selector::kDoubleSparsity) {
    return {sections.label_channels, methods.section_offset + sections.labels(),
            wave.methods.units};
  }
  return {wave.shape.head_dim, methods.section_offset + sections.sketch(), nullptr};
}

}  // namespace

cudaError_t LaunchSketchReference(const Wave& wave, cudaStream_t stream) {
  return wave.shape.group <= 4
             ? LaunchLogitReference<SketchEstimates<4>>(wave, ContextOf<4>(wave), stream)
             : LaunchLogitReference<SketchEstimates<16>>(wave, ContextOf<16>(wave), stream);
}

cudaError_t LaunchSketchScore(const Wave& wave, cudaStream_t stream) {
  return wave.shape.group <= 4
             ? LaunchLogitScore<SketchEstimates<4>>(wave, ContextOf<4>(wave), stream)
             : LaunchLogitScore<SketchEstimates<16>>(wave, ContextOf<16>(wave), stream);
}

}  // namespace spillway::cuda
