#pragma once

#include "gpu/kernels/page_norms.cuh"
#include "gpu/kernels/page_rotation.cuh"

// Encodes closed pages. Each row is read once: a block keeps a page's keys in shared memory while
// it finds their centre, normalises and rotates them. It reads keys again only if some are far from
// all others.
namespace spillway::cuda {

// Bytes of two slices of P^T and of the keys [d][128].
inline constexpr int EncodePageSharedBytes(int head_dim) {
  return (2 * kSliceFloats + head_dim * kPageTokenCount) * static_cast<int>(sizeof(float));
}

// Encodes a page of a KV head. Writes the keys' radii to radii [128], or if that is null, norms to
// the page. A block of kPageThreads. Shared memory: EncodePageSharedBytes().
__device__ inline void EncodePage(const EncodeWork& work, const RotationWeights& weights,
                                  const Quantiser& quantiser, const HeadIndex& heads, float* radii,
                                  int64_t page_index, int head) {
  extern __shared__ float4 shared[];
  __shared__ __align__(16) float radius[kPageTokenCount];
  float* slices = reinterpret_cast<float*>(shared);
  // The second slice is not copied before the product begins: the scratch takes its place.
  static_assert(sizeof(PageScratch) <= kSliceFloats * sizeof(float));
  auto& scratch = *reinterpret_cast<PageScratch*>(slices + kSliceFloats);
  float* x = slices + 2 * kSliceFloats;
  const int dim = work.head_dim;
  const std::byte* rows = work.row_pages[head * work.row_page_capacity + page_index];
  std::byte* page = work.code_pages[head * work.code_page_capacity + page_index];
  const float* value_centre = heads.value_centres + head * dim;

  CopySlice(weights.transposed, dim, 0, 0, slices);
  if (radii == nullptr) {
    // Reads of keys and values are in flight at the same time.
    RoughDistances distances(work, rows);
    LoadKeys(work, rows, x);
    distances.Sum(work, value_centre, heads.statistics[head].value_unit, scratch.square);
  } else {
    LoadKeys(work, rows, x);
  }
  __syncthreads();
  Centre(work, weights.raw_keys, x, page, scratch.centre);
  __syncthreads();
  DivideByLargest(dim, x, radius, scratch);
  bool uneven = IsUneven(radius);
  if (uneven && !weights.raw_keys) {
    CentreAgain(work, rows, x, radius, page, scratch.centre);
    DivideByLargest(dim, x, radius, scratch);
    uneven = IsUneven(radius);
  }
  DivideByNorm(dim, x, scratch);
  if (threadIdx.x < kPageTokenCount) {
    if (radii == nullptr) {
      StoreNorms(work, heads.statistics[head], value_centre, rows, scratch.square, radius, uneven,
                 page);
    } else {
      radii[threadIdx.x] = radius[threadIdx.x];
    }
  }
  StoreCodes(work, weights.transposed, quantiser, slices, x, radius, page);
}

// One block per page: blockIdx.x counts pages from that of work.begin, blockIdx.y is the KV head.
// radii: null or [H][pages][128], see EncodePage().
__global__ void __launch_bounds__(kPageThreads, 2)
    EncodePageKernel(EncodeWork work, RotationWeights weights, Quantiser quantiser, HeadIndex heads,
                     float* radii) {
  const int head = blockIdx.y;
  const int64_t at = int64_t{head} * gridDim.x + blockIdx.x;
  EncodePage(work, weights, quantiser, heads,
             radii == nullptr ? nullptr : radii + at * kPageTokenCount,
             work.begin / kPageTokenCount + blockIdx.x, head);
}

}  // namespace spillway::cuda
