#pragma once

#include "gpu/kernels/page_norms.cuh"
#include "gpu/kernels/page_rotation.cuh"

// The encoder of closed pages. A row is read once: a block holds a page's keys
// in shared memory while it finds their centre, divides and rotates them. Only
// keys far from all others make it read the page anew.
namespace spillway::cuda {

// Two slices of P^T and the keys [d][128].
inline constexpr int EncodePageSharedBytes(int head_dim) {
  return (2 * kSliceFloats + head_dim * kPageTokenCount) * static_cast<int>(sizeof(float));
}

// A page of a KV head. With `radii` [128] the radii go there, else norms to the page.
// All threads of a block of kPageThreads. Shared memory: EncodePageSharedBytes().
__device__ inline void EncodePage(const EncodeWork& work, const RotationWeights& weights,
                                  const Quantiser& quantiser, const HeadIndex& heads, float* radii,
                                  int64_t page_index, int head) {
  extern __shared__ float4 shared[];
  __shared__ __align__(16) float radius[kPageTokenCount];
  float* slices = reinterpret_cast<float*>(shared);
  // The second slice is not copied before the product begins.
  static_assert(sizeof(PageScratch) <= kSliceFloats * sizeof(float));
  auto& scratch = *reinterpret_cast<PageScratch*>(slices + kSliceFloats);
  float* x = slices + 2 * kSliceFloats;
  const int dim = work.head_dim;
  const std::byte* rows = work.row_pages[head * work.row_page_capacity + page_index];
  std::byte* page = work.code_pages[head * work.code_page_capacity + page_index];
  const float* value_centre = heads.value_centres + head * dim;

  CopySlice(weights.transposed, dim, 0, 0, slices);
  if (radii == nullptr) {
    // Both halves of the rows are on their way at once.
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

// blockIdx.x: page from that of work.begin on; blockIdx.y: KV head. With radii
// [H][pages][128] the radii go there, else norms to the page.
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
