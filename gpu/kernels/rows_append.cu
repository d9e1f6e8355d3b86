#include <algorithm>

#include "gpu/kernels/device_math.cuh"
#include "gpu/kernels/finite.cuh"
#include "gpu/kernels/launch.cuh"
#include "gpu/kernels/rows_append.h"

namespace spillway::cuda {
namespace {

// Few blocks, as in a gather: more blocks have more addresses in flight than can be translated in
// time (docs/link.md).
constexpr unsigned kBlocks = 8;
// Within GPU memory, apart from rows of a page that an earlier append began.
constexpr unsigned kBlocksOnGpu = 64;
constexpr int kThreads = 1024;
// Rows that a warp has in flight.
constexpr int kAhead = 4;

// One row: its KV head and token, and where each 16 bytes of it come from and go to.
class RowMove {
 public:
  __device__ RowMove(const RowsAppend& a, uint32_t row)
      : head_(row / Tokens(a)), token_(a.begin + row % Tokens(a)), is_new_(token_ >= a.start) {}

  __device__ uint4 Load(const RowsAppend& a, int chunk) const {
    const int half = static_cast<int>(a.row_bytes / 32);
    const std::byte* from = nullptr;
    if (!is_new_) {
      from = Page(a) + chunk * 16;
    } else if (chunk < half) {
      from = a.k + head_ * a.k_head_stride + (token_ - a.start) * a.k_token_stride + chunk * 16;
    } else {
      from = a.v + head_ * a.v_head_stride + (token_ - a.start) * a.v_token_stride +
             (chunk - half) * 16;
    }
    return __ldcs(reinterpret_cast<const uint4*>(from));
  }

  __device__ void Store(const RowsAppend& a, int chunk, uint4 bytes) const {
    if (is_new_) {
      if (const int at = FirstBad(a.dtype, bytes); at >= 0) {
        const int half = static_cast<int>(a.row_bytes / 32);
        const int value = chunk < half ? 0 : 1;
        const int element = (chunk - value * half) * ElementsOf16(a.dtype) + at;
        atomicMin(a.bad, MakeBadRow(token_, a.first_head + head_, value, element));
        bytes = make_uint4(0, 0, 0, 0);
      }
      if (a.writes_pages) Put(Page(a), chunk, bytes);
    }
    if (a.stage != nullptr) {
      const int64_t at = head_ * a.stage_pages * kPageTokenCount + (token_ - a.begin);
      Put(a.stage + at * a.row_bytes, chunk, bytes);
    }
    const ResidentRows& resident = a.resident[head_];
    const auto token = static_cast<uint32_t>(token_);
    if (token_ < resident.whole_end) {
      Put(RowAddress(resident.whole_pages, a.row_bytes, token), chunk, bytes);
    }
    if (IsSampled(resident, token)) Put(SampledRow(resident, a.row_bytes, token), chunk, bytes);
    if (resident.recent != nullptr && token_ >= a.recent_begin) {
      Put(resident.recent + token_ % kRecentRows * a.row_bytes, chunk, bytes);
    }
  }

 private:
  __device__ static uint32_t Tokens(const RowsAppend& a) {
    return static_cast<uint32_t>(a.end - a.begin);
  }
  __device__ const std::byte* Page(const RowsAppend& a) const {
    return RowAddress(a.row_pages + head_ * a.row_page_capacity, a.row_bytes, token_);
  }
  __device__ static void Put(const std::byte* row, int chunk, const uint4& bytes) {
    reinterpret_cast<uint4*>(const_cast<std::byte*>(row))[chunk] = bytes;
  }

  const int64_t head_;
  const int64_t token_;
  const bool is_new_;
};

// One warp per row; neighbouring warps take neighbouring rows.
__global__ void __launch_bounds__(kThreads) RowsAppendKernel(RowsAppend a) {
  const int chunks = static_cast<int>(a.row_bytes / 16);
  const auto rows = static_cast<uint32_t>(a.head_count * (a.end - a.begin));
  const uint32_t warps = gridDim.x * blockDim.x / 32;
  const uint32_t warp = (blockIdx.x * blockDim.x + threadIdx.x) / 32;
  for (uint32_t first = warp; first < rows; first += kAhead * warps) {
    for (int chunk = threadIdx.x % 32; chunk < chunks; chunk += 32) {
      uint4 bytes[kAhead];
#pragma unroll
      for (uint32_t n = 0; n < kAhead; ++n) {
        const uint32_t row = first + n * warps;
        if (row < rows) bytes[n] = RowMove(a, row).Load(a, chunk);
      }
#pragma unroll
      for (uint32_t n = 0; n < kAhead; ++n) {
        const uint32_t row = first + n * warps;
        if (row < rows) RowMove(a, row).Store(a, chunk, bytes[n]);
      }
    }
  }
}

}  // namespace

cudaError_t LaunchRowsAppend(const RowsAppend& append, cudaStream_t stream) {
  const int64_t rows = append.head_count * (append.end - append.begin);
  if (rows == 0) return cudaSuccess;
  constexpr int kWarps = kThreads / 32;
  const auto blocks = static_cast<unsigned>(std::min<int64_t>(
      (rows + kWarps - 1) / kWarps, append.writes_pages ? kBlocks : kBlocksOnGpu));
  return Launch<RowsAppendKernel>({{blocks}, kThreads}, stream, append);
}

}  // namespace spillway::cuda
