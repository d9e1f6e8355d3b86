#include "gpu/kernels/cut.cuh"
#include "gpu/kernels/launch.cuh"

namespace spillway::cuda {

cudaError_t LaunchCut(const Wave& wave, cudaStream_t stream) {
  const auto units = static_cast<unsigned>(wave.unit_count);
  const size_t shared = sizeof(uint32_t) * wave.shape.bin_count;
  return Launch<CutKernel>({units, kCutThreads, shared, wave.overlap}, stream, wave.shape,
                           wave.units);
}

}  // namespace spillway::cuda
