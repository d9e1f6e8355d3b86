#pragma once

#include <algorithm>

#include "gpu/kernels/fold.cuh"
#include "gpu/kernels/launch.cuh"

// How kernels that fold are launched.
namespace spillway::cuda {

inline LaunchShape FoldLaunch(dim3 grid, int head_dim, int row_capacity, bool moments,
                              bool overlap) {
  const int needed = std::max(head_dim, moments ? kProjectedPairs : 128);
  return {grid, (needed + 31) / 32 * 32,
          sizeof(float) * FoldFloats(head_dim, row_capacity, moments), overlap};
}

// Folds a phase's splits, with Weigh in place of the logits; see PlainLogits.
template <typename Weigh>
cudaError_t LaunchFoldOf(const Wave& wave, int phase, const typename Weigh::Context& context,
                         cudaStream_t stream) {
  const dim3 grid(kSplitMax, wave.unit_count);
  const auto fold = [&]<int kRows>() {
    return Launch<FoldKernel<kRows, Weigh>>(
        FoldLaunch(grid, wave.shape.head_dim, kRows, /*moments=*/true, wave.overlap), stream,
        wave.shape, context, phase, wave.units);
  };
  return wave.shape.group <= 4 ? fold.template operator()<4>() : fold.template operator()<16>();
}

}  // namespace spillway::cuda
