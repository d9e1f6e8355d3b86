#pragma once

#include "gpu/kernels/dense.h"
#include "gpu/kernels/fold.cuh"
#include "gpu/kernels/fold_tensor.cuh"
#include "gpu/kernels/step.cuh"

// Exact attention over all rows.
namespace spillway::cuda {

// Whether the work is to stop. Called by one thread of a block or of each warp. One block of many
// reads the pinned word, and tells the others: reads of one word of host memory follow each other,
// and each takes 1 us. Readers are spread over the launch, because blocks run one after the other.
__device__ inline bool DenseStops(const DenseWave& wave) {
  constexpr unsigned kBlocksPerReader = 64;
  if (wave.cancel == nullptr) return false;
  volatile uint32_t* const running = wave.running;
  const bool reads = blockIdx.x % kBlocksPerReader == 0;
  if (reads && *static_cast<const volatile int32_t*>(wave.cancel) != 0) *running = 0;
  return *running == 0;
}

// The splits of all units of a wave are one list, which workers share: blocks or warps. Each has an
// equal part of it; but if rows come over the link, few workers take turns, and each split follows
// the one before.
class DenseTurns {
 public:
  __device__ DenseTurns(const DenseWave& of, int worker, int workers)
      : DenseTurns(of, worker, workers, of.link_workers) {}
  // link_workers: workers that run if rows come over the link.
  __device__ DenseTurns(const DenseWave& of, int worker, int workers, int link_workers)
      : wave_(of) {
    const DenseUnit& last = wave_.units[wave_.unit_count - 1];
    const bool over_link = wave_.units[0].over_link;
    const int total = FirstOf(wave_.unit_count - 1) + CountOf(last);
    if (over_link) {
      step_ = min(workers, link_workers);
      at_ = worker < step_ ? worker : total;
      end_ = total;
    } else if (total <= workers) {
      at_ = worker;
      end_ = min(worker + 1, total);
    } else {
      at_ = static_cast<int>(int64_t{total} * worker / workers);
      end_ = static_cast<int>(int64_t{total} * (worker + 1) / workers);
    }
  }
  // Loads the next unit of which the worker has splits, and says which. load(from, unit): copies a
  // unit, when all threads of the worker are done with the one before. All of them call Next(), and
  // have the same answer.
  template <typename Load>
  __device__ bool Next(DenseUnit& unit, SplitRange& splits, Load load) {
    while (at_ < end_) {
      const int i = UnitOf(at_);
      load(wave_.units + i, unit);
      const int first = FirstOf(i);
      const int room = unit.staged ? static_cast<int>(wave_.split_count_max) : CountOf(unit);
      const int end = min(first + CountOf(unit), end_);
      const int begin = at_;
      at_ += (min(first + room, end_) - at_ + step_ - 1) / step_ * step_;
      if (begin >= end) continue;
      const int skipped = unit.staged ? static_cast<int>(wave_.first / kStagedSplitRows) : 0;
      splits = {begin - first + skipped, end - first + skipped, step_};
      return true;
    }
    return false;
  }

 private:
  // Where the list has the splits of unit i. Staged units have as much room as the longest.
  __device__ int FirstOf(int i) const {
    const DenseUnit& unit = wave_.units[i];
    return unit.staged ? i * static_cast<int>(wave_.split_count_max) : unit.first_split;
  }
  __device__ int CountOf(const DenseUnit& unit) const {
    if (!unit.staged) return static_cast<int>(unit.split_count);
    const int64_t rows = max(int64_t{0}, min(unit.n, wave_.limit) - wave_.first);
    return static_cast<int>((rows + kStagedSplitRows - 1) / kStagedSplitRows);
  }
  // The last unit that does not begin after split `at` of the list.
  __device__ int UnitOf(int at) const {
    int begun = 0;
    for (int i = static_cast<int>(threadIdx.x % 32); i < wave_.unit_count; i += 32) {
      if (FirstOf(i) <= at) ++begun;
    }
    return static_cast<int>(WarpSum(static_cast<float>(begun))) - 1;
  }

  const DenseWave& wave_;
  int at_;
  int end_;
  int step_ = 1;
};

// How blocks load units.
__device__ inline void LoadUnit(const DenseUnit* from, DenseUnit& to) {
  __syncthreads();
  LoadRequest(from, to);
}

// The splits of a dense unit. Where rows are read in place, split s of S has tiles s, s + S, ... of
// kTensorTileRows rows, so that blocks that run at once read from addresses near each other. Staged
// rows are split into stretches.
struct DenseRows {
  static constexpr bool kMoments = false;
  const DenseWave& wave;
  const DenseUnit& u;
  int64_t limit;  // rows that this launch folds
  // Of rows that are read in place: tiles that each split has, how many splits have one more, and
  // which one has the last tile.
  int tiles;
  int longer;
  int last;

  __device__ DenseRows(const DenseWave& of, const DenseUnit& unit)
      : wave(of), u(unit), limit(min(unit.n, of.limit)) {
    const auto all = static_cast<int>((limit + kTensorTileRows - 1) / kTensorTileRows);
    const auto splits = static_cast<int>(unit.split_count);
    tiles = all / splits;
    longer = all - tiles * splits;
    last = (longer == 0 ? splits : longer) - 1;
  }

  __device__ KvSplit At(int split) const {
    if (u.staged) {
      const int64_t first = split * kStagedSplitRows;
      return {0, static_cast<int32_t>(min(kStagedSplitRows, limit - first)), first};
    }
    auto count = static_cast<int32_t>((tiles + (split < longer ? 1 : 0)) * kTensorTileRows);
    if (split == last) count -= static_cast<int32_t>(-limit & (kTensorTileRows - 1));
    return {0, count, int64_t{split} * kTensorTileRows};
  }
  __device__ bool HasMoments(const KvSplit&) const { return false; }
  // The token of row i.
  __device__ int64_t Token(const KvSplit& split, int i) const {
    const auto apart = u.staged ? 1 : static_cast<int>(u.split_count);
    return split.first + int64_t{i / kTensorTileRows} * apart * kTensorTileRows +
           i % kTensorTileRows;
  }
  __device__ const std::byte* Row(const KvSplit& split, int i) const {
    return RowAddress(u.row_pages, wave.row_bytes, Token(split, i) - wave.first);
  }
  __device__ bool Visible(int r, const KvSplit& split, int i) const {
    return Token(split, i) < u.visible[r];
  }
  __device__ void Bad(const KvSplit& split, int i) const {
    atomicMin(u.error_token, static_cast<uint32_t>(Token(split, i)));
  }
  __device__ float Query(int r, int i) const {
    const int element = r * wave.head_dim + i;
    return u.q != nullptr ? u.q[element]
                          : TensorQuery(wave.step, u.place, wave.group, wave.head_dim, element);
  }
  // Where query row r is, and its elements' type.
  __device__ const std::byte* QueryAddress(int r, DType& dtype) const {
    dtype = u.q != nullptr ? DType::kF32 : wave.step.q_dtype;
    if (u.q != nullptr) return reinterpret_cast<const std::byte*>(u.q + r * wave.head_dim);
    return wave.step.q.At(u.place.item, u.place.query + r / wave.group,
                          int64_t{u.place.group_index} * wave.group + r % wave.group);
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

// Folds the splits of dense units. Grid (blocks).
__global__ void DenseFoldKernel(DenseWave wave) {
  extern __shared__ __align__(16) float memory[];
  __shared__ SoftmaxSums sums[kDenseQueryRows];
  __shared__ bool stop;
  __shared__ __align__(8) std::byte unit[sizeof(DenseUnit)];  // it has a constructor
  auto& u = *reinterpret_cast<DenseUnit*>(unit);
  const int d = wave.head_dim;
  const auto thread = static_cast<int>(threadIdx.x);
  float* queries = memory;
  float* rest = queries + kDenseQueryRows * d;
  DenseTurns turns(wave, static_cast<int>(blockIdx.x), static_cast<int>(gridDim.x));
  GridDependencyWait();
  TriggerDependents();
  for (SplitRange splits; turns.Next(u, splits, LoadUnit);) {
    const DenseRows rows(wave, u);
    for (int i = thread; i < u.query_rows * d; i += static_cast<int>(blockDim.x)) {
      queries[i] = rows.Query(0, i) * wave.scale;
    }
    const FoldShape fold = {wave.format(), d, u.query_rows};
    for (int s = splits.begin; s < splits.end; s += splits.step) {
      if (thread == 0) stop = rows.Stops();
      if (thread < kDenseQueryRows) sums[thread] = SoftmaxSums::Empty();
      __syncthreads();
      if (stop) return;
      const KvSplit split = rows.At(s);
      ValueSums<kDenseQueryRows, false> values;
      FoldRows<kDenseQueryRows, false, 4>(
          fold, split.count, [&](int64_t j) { return rows.Row(split, static_cast<int>(j)); },
          [&](int r, int64_t j) { return rows.Visible(r, split, static_cast<int>(j)); },
          [&](int64_t j) { rows.Bad(split, static_cast<int>(j)); },
          [](int, int64_t, const float*, float l) { return l; }, queries, rest, sums, values);
      __syncthreads();
      if (thread < u.query_rows) rows.Out(s, thread, sums[thread]);
      if (thread < d) {
#pragma unroll
        for (int r = 0; r < kDenseQueryRows; ++r) {
          if (r >= u.query_rows) break;
          rows.Values(s)[r * d + thread] = values.value[r];
        }
      }
      __syncthreads();
    }
  }
}

// The same for rows of 16 bits. Grid (blocks). Shared memory: TensorLayout.
template <DType kDType, int kHeads, int kDimTiles, RowType kType>
__global__ void __launch_bounds__(kTensorThreads) DenseTensorKernel(DenseWave wave) {
  extern __shared__ __align__(128) std::byte fold_memory[];
  __shared__ __align__(8) std::byte unit[sizeof(DenseUnit)];  // it has a constructor
  auto& u = *reinterpret_cast<DenseUnit*>(unit);
  DenseTurns turns(wave, static_cast<int>(blockIdx.x), static_cast<int>(gridDim.x));
  GridDependencyWait();
  TriggerDependents();
  for (SplitRange splits; turns.Next(u, splits, LoadUnit);) {
    const DenseRows rows(wave, u);
    FoldOnTensorCores<kDType, kHeads, kDimTiles, kType>({wave.head_dim, u.query_rows, wave.scale},
                                                        rows, splits, fold_memory);
  }
}

inline constexpr int kDenseFinishThreads = 512;

// Merges a dense unit's splits, in an order that depends on their number alone. Grid (query rows,
// units); kDenseFinishThreads.
__global__ void __launch_bounds__(kDenseFinishThreads, 2) DenseFinishKernel(DenseWave wave) {
  constexpr int kThreads = kDenseFinishThreads;
  static_assert(kHeadDimMax <= kThreads);
  __shared__ float factors[kThreads];
  __shared__ double shares[kThreads][4];
  __shared__ float warp_max[kThreads / 32];
  __shared__ double warp_sums[kThreads / 32];
  const DenseUnit& u = wave.units[blockIdx.y];
  const int r = blockIdx.x;
  const int d = wave.head_dim;
  // Read before the wait: the fold does not write them.
  const int query_rows = u.query_rows;
  const int64_t split_count = u.split_count;
  const float* const partials = u.partials;
  uint32_t* const error_token = u.error_token;
  const float sink = u.sinks != nullptr ? u.sinks[r % wave.group] : -INFINITY;
  GridDependencyWait();
  if (r == 0 && threadIdx.x == 0) u.result->error_token = *error_token;
  if (r >= query_rows) return;
  const int lane = threadIdx.x % 32;
  const int warp = threadIdx.x / 32;
  const int64_t stride = query_rows * (2 + d);
  const auto part_of = [&](int64_t split) {
    return *reinterpret_cast<const float2*>(partials + 2 * r + split * stride);
  };
  // Few units have more splits than threads.
  const float2 own = threadIdx.x < split_count ? part_of(threadIdx.x) : make_float2(-INFINITY, 0);
  float max = fmaxf(own.x, sink);
  for (int64_t s = threadIdx.x + kThreads; s < split_count; s += kThreads) {
    max = fmaxf(max, part_of(s).x);
  }
  max = WarpMax(max);
  if (lane == 0) warp_max[warp] = max;
  __syncthreads();
  for (const float of_warp : warp_max) max = fmaxf(max, of_warp);

  // Each four elements have several threads, which share the splits. d is a multiple of 16.
  const int fours = d / 4;
  const int share_count = kThreads / fours;
  const int share = static_cast<int>(threadIdx.x) / fours;
  const int four = static_cast<int>(threadIdx.x) % fours;
  // 8-byte aligned: the maxima and sums before it are pairs.
  const float* const values = partials + 2 * query_rows + r * d + 4 * four;
  double sum = 0;
  double of_four[4] = {};
  for (int64_t base = 0; base < split_count; base += kThreads) {
    const int count = static_cast<int>(min(int64_t{kThreads}, split_count - base));
    if (static_cast<int>(threadIdx.x) < count) {
      const float2 part = base == 0 ? own : part_of(base + threadIdx.x);
      const float factor = SoftmaxFactor(part.x, max);
      factors[threadIdx.x] = factor;
      sum += double{factor} * part.y;
    }
    __syncthreads();
    if (share < share_count) {
      // Many are loaded at once, because the latency of memory is high.
      constexpr int kTogether = 8;
      for (int first = share; first < count; first += kTogether * share_count) {
        float2 low[kTogether], high[kTogether];
#pragma unroll
        for (int i = 0; i < kTogether; ++i) {
          const int s = first + i * share_count;
          if (s >= count) continue;
          const float* const of_split = values + (base + s) * stride;
          low[i] = *reinterpret_cast<const float2*>(of_split);
          high[i] = *reinterpret_cast<const float2*>(of_split + 2);
        }
#pragma unroll
        for (int i = 0; i < kTogether; ++i) {
          const int s = first + i * share_count;
          if (s >= count) break;
          const double factor = factors[s];
          of_four[0] += factor * low[i].x;
          of_four[1] += factor * low[i].y;
          of_four[2] += factor * high[i].x;
          of_four[3] += factor * high[i].y;
        }
      }
    }
    __syncthreads();
  }
  sum = WarpSum(sum);
  if (lane == 0) warp_sums[warp] = sum;
#pragma unroll
  for (int e = 0; e < 4; ++e) shares[threadIdx.x][e] = of_four[e];
  __syncthreads();
  sum = sink > -INFINITY ? exp(double{sink} - max) : 0.0;
  for (const double of_warp : warp_sums) sum += of_warp;
  // Thread i has element i now.
  double value = 0;
  for (int i = 0; i < share_count && static_cast<int>(threadIdx.x) < d; ++i) {
    value += shares[i * fours + static_cast<int>(threadIdx.x) / 4][threadIdx.x % 4];
  }
  const auto out = static_cast<float>(value / sum);
  const auto lse = static_cast<float>(max + log(sum));
  if (wave.step.check.header != nullptr) {
    const bool good = *error_token == kNoToken && StepHolds(wave.step.check, u.place.item);
    return WriteToTensors(
        wave.step, u.place, wave.group, d, r, good, [&](int) { return out; }, lse,
        u.result->report);
  }
  if (static_cast<int>(threadIdx.x) < d) u.out[r * d + threadIdx.x] = out;
  if (threadIdx.x == 0) u.lse[r] = lse;
}

}  // namespace spillway::cuda
