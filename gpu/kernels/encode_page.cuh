#pragma once

#include "gpu/kernels/page_norms.cuh"
#include "gpu/kernels/page_rotation.cuh"
#include "gpu/kernels/page_values.cuh"

// Encodes closed pages. Each row is read once: a block keeps a page's keys in shared memory while
// it finds their centre, normalises and rotates them. It reads keys again only if some are far from
// all others.
namespace spillway::cuda {

// What the first pages' statistics are computed from, of one page.
struct FirstPage {
  float* radii;         // [128]
  float* value_centre;  // [d]
};

// Quantisers of keys and values, and the scale of the values' transform.
struct PageCoding {
  static PageCoding Of(const CodeTiling& tiling, int head_dim, int key_bits) {
    PageCoding coding;
    coding.keys = Quantiser::Of(head_dim, key_bits);
    if (tiling.value_bits > 0) coding.values = Quantiser::Of(head_dim, tiling.value_bits);
    coding.hadamard_scale = HadamardScale(head_dim);
    return coding;
  }

  Quantiser keys;
  Quantiser values;  // with value codes
  float hadamard_scale = 0;
};

// Bytes of two slices of P^T and of the keys [d][128].
inline constexpr int EncodePageSharedBytes(int head_dim) {
  return (2 * kSliceFloats + head_dim * kPageTokenCount) * static_cast<int>(sizeof(float));
}

// Encodes a page of a KV head. Without `first`, writes the page's norms, too. With it, writes
// the keys' radii and the value centre there. A block of kPageThreads. Shared memory:
// EncodePageSharedBytes().
__device__ inline void EncodePage(const EncodeWork& work, const RotationWeights& weights,
                                  const PageCoding& coding, const HeadIndex& heads,
                                  const FirstPage* first, int64_t page_index, int head) {
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

  {
    // Reads of keys and values are in flight at the same time.
    PageValues values(work, rows);
    LoadVectors(work, rows, 0, x);
    const float unit = first == nullptr ? heads.statistics[head].value_unit : 1.0f;
    static_assert(kValueMeansFloats <= kSliceFloats);
    values.Measure(work, unit, slices, scratch.value_centre, scratch.square);
  }
  __syncthreads();
  CopySlice(weights.transposed, dim, 0, 0, slices);
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
  if (first == nullptr) {
    StoreNorms(work, heads.statistics[head], heads.value_centres + head * dim, rows, scratch,
               radius, uneven, page);
  } else {
    if (threadIdx.x < kPageTokenCount) first->radii[threadIdx.x] = radius[threadIdx.x];
    for (int i = threadIdx.x; i < dim; i += kPageThreads) {
      first->value_centre[i] = scratch.value_centre[i];
    }
  }
  if (work.tiling.value_bits > 0) {
    auto* const centre =
        reinterpret_cast<uint16_t*>(page + work.tiling.value_centre_offset_bytes());
    for (int i = threadIdx.x; i < dim; i += kPageThreads) {
      centre[i] = FloatToBFloat16(scratch.value_centre[i]);
    }
  }
  StoreCodes(work, weights.transposed, coding.keys, slices, x, radius, page);
  if (work.tiling.value_bits > 0) {
    StoreValueCodes(work, coding.values, coding.hadamard_scale, rows, x, radius, scratch, page);
  }
}

// One block per page: blockIdx.x counts pages from that of work.begin, blockIdx.y is the KV head.
// radii: null, or [H][pages][128] with value_centres [H][pages][d], see EncodePage().
__global__ void __launch_bounds__(kPageThreads, 2)
    EncodePageKernel(EncodeWork work, RotationWeights weights, PageCoding coding, HeadIndex heads,
                     float* radii, float* value_centres) {
  const int head = blockIdx.y;
  const int64_t at = int64_t{head} * gridDim.x + blockIdx.x;
  const FirstPage first = {radii + at * kPageTokenCount, value_centres + at * work.head_dim};
  EncodePage(work, weights, coding, heads, radii == nullptr ? nullptr : &first,
             work.begin / kPageTokenCount + blockIdx.x, head);
}

}  // namespace spillway::cuda
