#include <algorithm>

#include "gpu/kernels/launch.cuh"
#include "gpu/methods/mlp.cuh"

namespace spillway::cuda {
namespace {

// With at most so many blocks, narrow ones with many threads per vector have a lower latency.
constexpr int64_t kFewBlocks = 128;

template <int kVectors, int kColumns, typename Vectors>
cudaError_t Run(const Vectors& vectors, const MlpWeightsView& weights, int head_dim, int heads,
                int64_t begin, int64_t end, int threads, cudaStream_t stream) {
  const int64_t blocks = (end + kVectors - 1) / kVectors - begin / kVectors;
  const dim3 grid(static_cast<unsigned>(blocks), heads);
  const int inner = weights.w3 == nullptr ? 0 : weights.hidden_dim;
  const size_t shared = MlpSharedBytes<kVectors, kColumns>(head_dim, inner, threads);
  return Launch<MlpKernel<kVectors, kColumns, Vectors>>({grid, threads, shared}, stream, vectors,
                                                        weights, head_dim);
}

// Computes the codes of vectors [begin, end) of each of `heads` MLPs.
template <typename Vectors>
cudaError_t RunMlp(const Vectors& vectors, const MlpWeightsView& weights, int head_dim, int heads,
                   int64_t begin, int64_t end, cudaStream_t stream) {
  const int bits = weights.hash_bits;
  const auto run = [&]<int kVectors, int kColumns>(int threads) {
    return Run<kVectors, kColumns>(vectors, weights, head_dim, heads, begin, end, threads, stream);
  };
  if ((end - begin + 3) / 4 * heads <= kFewBlocks) {
    if (bits <= 256) return run.template operator()<4, 1>(std::max(bits, 128));
    return run.template operator()<4, 4>(256);
  }
  if (bits <= 256) return run.template operator()<16, 2>(bits <= 128 ? 64 : 128);
  return run.template operator()<16, 4>(bits <= 512 ? 128 : 256);
}

}  // namespace

cudaError_t LaunchEncodeMlp(const EncodeWork& work, const MlpWeightsView& weights,
                            cudaStream_t stream) {
  if (work.end <= work.begin) return cudaSuccess;
  const int words = weights.hash_bits / 32;
  const int codes = work.tiling.words / words;
  return RunMlp(KeyVectors{work, codes, words}, weights, work.head_dim, work.kv_head_count * codes,
                work.begin, work.end, stream);
}

cudaError_t LaunchMlpCodes(const MlpWeightsView& weights, int head_dim, int group, const float* x,
                           int count, uint32_t* bits, cudaStream_t stream) {
  if (count <= 0) return cudaSuccess;
  const QueryVectors vectors{x, head_dim, group, bits, weights.hash_bits / 32};
  return RunMlp(vectors, weights, head_dim, count / group, 0, group, stream);
}

}  // namespace spillway::cuda
