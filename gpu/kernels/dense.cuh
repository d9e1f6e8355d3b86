#pragma once

#include "gpu/kernels/fold.cuh"
#include "gpu/kernels/fold_tensor.cuh"
#include "gpu/kernels/step.cuh"

// Exact attention over all rows.
namespace spillway::cuda {

// Whether the work is to stop. Called by one thread of a block. One block of many reads the pinned
// word, and tells the others: reads of one word of host memory follow each other, and each takes
// 1 us. Readers are spread over the launch, because blocks run one after the other.
__device__ inline bool DenseStops(const DenseWave& wave) {
  constexpr unsigned kBlocksPerReader = 64;
  if (wave.cancel == nullptr) return false;
  volatile uint32_t* const running = wave.running;
  const bool reads = (blockIdx.y * gridDim.x + blockIdx.x) % kBlocksPerReader == 0;
  if (reads && *static_cast<const volatile int32_t*>(wave.cancel) != 0) *running = 0;
  return *running == 0;
}

// Folds the splits of dense units. Grid (blocks, units).
__global__ void DenseFoldKernel(DenseWave wave) {
  extern __shared__ __align__(16) float memory[];
  __shared__ SoftmaxSums sums[kDenseQueryRows];
  __shared__ bool stop;
  const DenseUnit& u = wave.units[blockIdx.y];
  const int d = wave.head_dim;
  const int64_t limit = min(u.n, wave.limit);
  const int64_t first_split = wave.first / u.split_rows;
  const int64_t split_end = (limit + u.split_rows - 1) / u.split_rows;
  if (first_split + blockIdx.x >= split_end) return;
  float* queries = memory;
  float* rest = queries + kDenseQueryRows * d;
  for (int i = threadIdx.x; i < u.query_rows * d; i += blockDim.x) {
    const float q = u.q != nullptr ? u.q[i] : TensorQuery(wave.step, u.place, wave.group, d, i);
    queries[i] = q * wave.scale;
  }
  const FoldShape fold = {wave.dtype, d, u.query_rows};
  for (int64_t s = first_split + blockIdx.x; s < split_end; s += gridDim.x) {
    if (threadIdx.x == 0) stop = DenseStops(wave);
    if (threadIdx.x < kDenseQueryRows) sums[threadIdx.x] = SoftmaxSums::Empty();
    __syncthreads();
    if (stop) return;
    const int64_t first = s * u.split_rows;
    ValueSums<kDenseQueryRows, false> values;
    FoldRows<kDenseQueryRows, false, 4>(
        fold, min(u.split_rows, limit - first),
        [&](int64_t j) { return RowAddress(u.row_pages, wave.row_bytes, first - wave.first + j); },
        [&](int r, int64_t j) { return first + j < u.visible[r]; },
        [&](int64_t j) { atomicMin(u.error_token, static_cast<uint32_t>(first + j)); },
        [](int, int64_t, const float*, float l) { return l; }, queries, rest, sums, values);
    __syncthreads();
    float* out = u.partials + s * u.query_rows * (2 + d);
    if (threadIdx.x < u.query_rows) {
      out[2 * threadIdx.x] = sums[threadIdx.x].max;
      out[2 * threadIdx.x + 1] = sums[threadIdx.x].sum;
    }
    if (threadIdx.x < d) {
#pragma unroll
      for (int r = 0; r < kDenseQueryRows; ++r) {
        if (r >= u.query_rows) break;
        out[2 * u.query_rows + r * d + threadIdx.x] = values.value[r];
      }
    }
    __syncthreads();
  }
}

// The splits of a dense unit.
struct DenseRows {
  static constexpr bool kMoments = false;
  const DenseWave& wave;
  const DenseUnit& u;
  int64_t limit;  // rows that this launch folds

  __device__ int first_split() const { return static_cast<int>(wave.first / u.split_rows); }
  __device__ int split_end() const {
    return static_cast<int>((limit + u.split_rows - 1) / u.split_rows);
  }
  __device__ KvSplit At(int split) const {
    const int64_t first = split * u.split_rows;
    return {0, static_cast<int32_t>(min(u.split_rows, limit - first)), first};
  }
  __device__ bool HasMoments(const KvSplit&) const { return false; }
  __device__ const std::byte* Row(const KvSplit& split, int i) const {
    return RowAddress(u.row_pages, wave.row_bytes, split.first - wave.first + i);
  }
  __device__ bool Visible(int r, const KvSplit& split, int i) const {
    return split.first + i < u.visible[r];
  }
  __device__ void Bad(const KvSplit& split, int i) const {
    atomicMin(u.error_token, static_cast<uint32_t>(split.first + i));
  }
  __device__ float Query(int r, int i) const {
    const int element = r * wave.head_dim + i;
    return u.q != nullptr ? u.q[element]
                          : TensorQuery(wave.step, u.place, wave.group, wave.head_dim, element);
  }
  __device__ bool Stops() const { return DenseStops(wave); }
  __device__ float* Partial(int split) const {
    return u.partials + int64_t{split} * u.query_rows * (2 + wave.head_dim);
  }
  __device__ void Out(int split, int r, const SoftmaxSums& sums) const {
    *reinterpret_cast<float2*>(Partial(split) + 2 * r) = make_float2(sums.max, sums.sum);
  }
  __device__ float* Values(int split) const { return Partial(split) + 2 * u.query_rows; }
  __device__ float* ValuesSquared(int) const { return nullptr; }
  __device__ float* Pairs(int) const { return nullptr; }
};

// The same for rows of 16 bits. Grid (blocks, units). Shared memory: TensorLayout.
template <DType kDType, int kHeads, int kDimTiles>
__global__ void __launch_bounds__(kTensorThreads) DenseTensorKernel(DenseWave wave) {
  extern __shared__ __align__(16) std::byte fold_memory[];
  __shared__ __align__(8) std::byte unit[sizeof(DenseUnit)];  // it has a constructor
  auto& u = *reinterpret_cast<DenseUnit*>(unit);
  LoadRequest(wave.units + blockIdx.y, u);
  const DenseRows rows{wave, u, min(u.n, wave.limit)};
  FoldOnTensorCores<kDType, kHeads, kDimTiles>({wave.head_dim, u.query_rows, wave.scale}, rows,
                                               fold_memory);
}

inline constexpr int kDenseFinishThreads = 256;

// Merges a dense unit's splits, in an order that depends on their number alone. Grid (query rows,
// units); kDenseFinishThreads.
__global__ void __launch_bounds__(kDenseFinishThreads) DenseFinishKernel(DenseWave wave) {
  constexpr int kThreads = kDenseFinishThreads;
  static_assert(kHeadDimMax <= kThreads);
  __shared__ float factors[kThreads];
  __shared__ double shares[kThreads];
  __shared__ float warp_max[kThreads / 32];
  __shared__ double warp_sums[kThreads / 32];
  const DenseUnit& u = wave.units[blockIdx.y];
  const int r = blockIdx.x;
  const int d = wave.head_dim;
  if (r == 0 && threadIdx.x == 0) u.result->error_token = *u.error_token;
  if (r >= u.query_rows) return;
  const int lane = threadIdx.x % 32;
  const int warp = threadIdx.x / 32;
  const int64_t stride = u.query_rows * (2 + d);
  const float* const of_row = u.partials + 2 * r;
  float max = -INFINITY;
  for (int64_t s = threadIdx.x; s < u.split_count; s += kThreads) {
    max = fmaxf(max, of_row[s * stride]);
  }
  max = WarpMax(max);
  if (lane == 0) warp_max[warp] = max;
  __syncthreads();
  for (const float of_warp : warp_max) max = fmaxf(max, of_warp);

  // Each element has several threads, which share the splits.
  const int share_count = kThreads / d;
  const int share = static_cast<int>(threadIdx.x) / d;
  const int element = static_cast<int>(threadIdx.x) % d;
  const float* const values = u.partials + 2 * u.query_rows + r * d + element;
  double sum = 0, value = 0;
  for (int64_t base = 0; base < u.split_count; base += kThreads) {
    const int count = static_cast<int>(min(int64_t{kThreads}, u.split_count - base));
    if (static_cast<int>(threadIdx.x) < count) {
      const float* const part = of_row + (base + threadIdx.x) * stride;
      const float factor = SoftmaxFactor(part[0], max);
      factors[threadIdx.x] = factor;
      sum += double{factor} * part[1];
    }
    __syncthreads();
    if (share < share_count) {
#pragma unroll 8
      for (int s = share; s < count; s += share_count) {
        value += double{factors[s]} * values[(base + s) * stride];
      }
    }
    __syncthreads();
  }
  sum = WarpSum(sum);
  if (lane == 0) warp_sums[warp] = sum;
  shares[threadIdx.x] = value;
  __syncthreads();
  sum = 0;
  for (const double of_warp : warp_sums) sum += of_warp;
  value = 0;
  for (int i = 0; i < share_count; ++i) value += shares[i * d + element];
  const auto out = static_cast<float>(value / sum);
  const auto lse = static_cast<float>(max + log(sum));
  if (wave.step.check.header != nullptr) {
    // Thread i has element i.
    return WriteToTensors(
        wave.step, u.place, wave.group, d, r, *u.error_token == kNoToken, [&](int) { return out; },
        lse, u.result->report);
  }
  if (static_cast<int>(threadIdx.x) < d) u.out[r * d + threadIdx.x] = out;
  if (threadIdx.x == 0) u.lse[r] = lse;
}

}  // namespace spillway::cuda
