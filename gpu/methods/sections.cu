#include "gpu/kernels/launch.cuh"
#include "gpu/methods/sections.cuh"

namespace spillway::cuda {

cudaError_t LaunchEncodeSections(const EncodeWork& work, const SectionWeights& weights,
                                 cudaStream_t stream) {
  if (work.end <= work.begin || weights.sections.bytes() == 0) return cudaSuccess;
  const int64_t pages =
      (work.end + kPageTokenCount - 1) / kPageTokenCount - work.begin / kPageTokenCount;
  const dim3 grid(static_cast<unsigned>(pages), work.kv_head_count);
  const size_t shared = sizeof(float) * TileRows(work.head_dim) * TileStride(work.head_dim);
  return Launch<EncodeSectionsKernel>({grid, kSectionThreads, shared}, stream, work, weights);
}

}  // namespace spillway::cuda
