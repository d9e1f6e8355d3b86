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
  const int group = wave.shape.group;
  const auto launch = [&]<int kHeads> {
    return Launch<SumCodesKernel<kHeads>>(shape, stream, wave.shape, wave.units);
  };
  return group <= 4   ? launch.template operator()<4>()
         : group <= 8 ? launch.template operator()<8>()
                      : launch.template operator()<16>();
}

}  // namespace spillway::cuda
