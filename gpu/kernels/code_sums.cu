#include "gpu/kernels/code_sums.cuh"
#include "gpu/kernels/launch.cuh"

namespace spillway::cuda {
namespace {

template <int kWidth, int kHeads>
cudaError_t LaunchPart(const Wave& wave, int part, unsigned spans, cudaStream_t stream) {
  constexpr int kWords = SummedPage<kWidth>::kRunWords;
  const auto runs =
      static_cast<unsigned>((wave.shape.tiling.value_words(part) + kWords - 1) / kWords);
  return Launch<SumCodesKernel<kWidth, kHeads>>(
      {{spans, static_cast<unsigned>(wave.unit_count), runs},
       kSpanThreads,
       SumBytes<kWidth, kHeads>(wave.shape.group),
       wave.overlap},
      stream, wave.shape, part, wave.units);
}

}  // namespace

cudaError_t LaunchCodeSums(const Wave& wave, cudaStream_t stream) {
  // Scored pages may begin within a span of all pages.
  const auto spans = static_cast<unsigned>(
      (wave.token_count_max / kPageTokenCount + 1 + kSpanPages - 1) / kSpanPages);
  cudaError_t error = Launch<WeighPagesKernel>({{spans, static_cast<unsigned>(wave.unit_count)},
                                                kSpanThreads,
                                                WeighBytes(wave.shape),
                                                wave.overlap},
                                               stream, wave.shape, wave.units);
  const CodeTiling& tiling = wave.shape.tiling;
  for (int part = 0; part < tiling.value_parts() && error == cudaSuccess; ++part) {
    const bool wide = tiling.value_width(part) == 2;
    if (wave.shape.group <= 8) {
      error = wide ? LaunchPart<2, 8>(wave, part, spans, stream)
                   : LaunchPart<1, 8>(wave, part, spans, stream);
    } else {
      error = wide ? LaunchPart<2, 16>(wave, part, spans, stream)
                   : LaunchPart<1, 16>(wave, part, spans, stream);
    }
  }
  return error;
}

}  // namespace spillway::cuda
