#include "gpu/kernels/score_launch.cuh"
#include "gpu/methods/int4.cuh"
#include "gpu/methods/launchers.h"

namespace spillway::cuda {
namespace {

// The same context for any number of query heads.
template <int kRows>
typename Int4Estimates<kRows>::Context ContextOf(const Wave& wave) {
  const MethodShape& methods = *wave.methods.shape;
  const KeySections& sections = methods.sections;
  if (wave.shape.selector == Selector::kDoubleSparsity) {
    return {sections.label_channels, methods.section_offset + sections.labels(),
            wave.methods.units};
  }
  return {wave.shape.head_dim, methods.section_offset + sections.int4_keys(), nullptr};
}

}  // namespace

cudaError_t LaunchInt4Reference(const Wave& wave, cudaStream_t stream) {
  return wave.shape.group <= 4
             ? LaunchLogitReference<Int4Estimates<4>>(wave, ContextOf<4>(wave), stream)
             : LaunchLogitReference<Int4Estimates<16>>(wave, ContextOf<16>(wave), stream);
}

cudaError_t LaunchInt4Score(const Wave& wave, cudaStream_t stream) {
  return wave.shape.group <= 4
             ? LaunchLogitScore<Int4Estimates<4>>(wave, ContextOf<4>(wave), stream)
             : LaunchLogitScore<Int4Estimates<16>>(wave, ContextOf<16>(wave), stream);
}

}  // namespace spillway::cuda
