#include "gpu/kernels/launch.cuh"
#include "gpu/kernels/query.cuh"

namespace spillway::cuda {

cudaError_t LaunchPrepareQuery(const Wave& wave, cudaStream_t stream) {
  const AttendShape& shape = wave.shape;
  const PinnedRequests requests{wave.host_units, wave.host_q, wave.units};
  const auto units = static_cast<unsigned>(wave.unit_count);
  const bool overlap = wave.overlap && wave.append.key_count > 0 && !wave.first;
  switch (shape.selector) {
    case Selector::kAsymmetric: {
      const auto heads = static_cast<unsigned>((shape.group + 3) / 4 * 4);
      return Launch<PrepareAsymmetricKernel>({{heads, units}, shape.tiling.words * 32, 0, overlap},
                                             stream, shape, requests);
    }
    case Selector::kHamming: {
      const size_t shared = 2 * sizeof(float) * shape.group * shape.head_dim;
      return Launch<PrepareHammingKernel>({{1, units}, 512, shared, overlap}, stream, shape,
                                          requests);
    }
    default:
      return Launch<ClearUnitKernel>({{4, units}, 256, 0, overlap}, stream, shape, requests);
  }
}

}  // namespace spillway::cuda
