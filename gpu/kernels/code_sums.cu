#include "gpu/kernels/code_sums.cuh"
#include "gpu/kernels/launch.cuh"

namespace spillway::cuda {

size_t CodeSumsSharedBytes(int group) {
  AttendShape shape;
  shape.group = group;
  constexpr size_t kStaticBytes = sizeof(SpanPages) + sizeof(UnitRequest) + 1024;
  return static_cast<size_t>(SpanLayout(shape).end) + kStaticBytes;
}

cudaError_t LaunchCodeSums(const Wave& wave, cudaStream_t stream) {
  // Scored pages may begin within a span of all pages.
  const auto spans = static_cast<unsigned>(SpanCount(wave.token_count_max / kPageTokenCount + 1));
  const LaunchShape shape = {{spans, static_cast<unsigned>(wave.unit_count)},
                             kSpanThreads,
                             static_cast<size_t>(SpanLayout(wave.shape).end),
                             wave.overlap};
  return wave.shape.group <= 8 ? Launch<SumCodesKernel<8>>(shape, stream, wave.shape, wave.units)
                               : Launch<SumCodesKernel<16>>(shape, stream, wave.shape, wave.units);
}

}  // namespace spillway::cuda
