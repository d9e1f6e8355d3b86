#include <algorithm>

#include "gpu/kernels/device_math.cuh"
#include "gpu/kernels/finite.cuh"
#include "gpu/kernels/int8_rows.cuh"
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

  // Of rows that are not of 8 bits.
  __device__ uint4 Load(const RowsAppend& a, int chunk) const {
    const int half = static_cast<int>(a.row_bytes / 32);
    const std::byte* from = nullptr;
    if (!is_new_) {
      from = Page(a) + chunk * 16;
    } else if (chunk < half) {
      from = New(a, 0) + chunk * 16;
    } else {
      from = New(a, 1) + (chunk - half) * 16;
    }
    return __ldcs(reinterpret_cast<const uint4*>(from));
  }
  // Notes an element that is not finite, and sets the bytes to 0 then.
  __device__ uint4 Checked(const RowsAppend& a, int chunk, uint4 bytes) const {
    const int at = is_new_ ? FirstBad(a.dtype, bytes) : -1;
    if (at < 0) return bytes;
    const int half = static_cast<int>(a.row_bytes / 32);
    const int value = chunk < half ? 0 : 1;
    NoteBad(a, value, (chunk - value * half) * ElementsOf16(a.dtype) + at);
    return make_uint4(0, 0, 0, 0);
  }

  // The row as it is stored, of 8 bits, in shared memory. All lanes of the warp.
  __device__ void Encode(const RowsAppend& a, std::byte* row) const {
    if (!is_new_) {
      CopyStoredRow(Page(a), a.row_bytes, row);
      __syncwarp();
      return;
    }
    EncodeInt8Row(
        a.dtype, a.head_dim,
        [&](int half, int i) {
          const float x = LoadElement(a.dtype, New(a, half), i);
          if (isfinite(x)) return x;
          NoteBad(a, half, i);
          return 0.0f;
        },
        row);
  }

  __device__ void Store(const RowsAppend& a, int chunk, uint4 bytes) const {
    if (is_new_ && a.writes_pages) Put(Page(a), chunk, bytes);
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
  // The new K (0) or V (1).
  __device__ const std::byte* New(const RowsAppend& a, int value) const {
    const int64_t at = token_ - a.start;
    return value == 0 ? a.k + head_ * a.k_head_stride + at * a.k_token_stride
                      : a.v + head_ * a.v_head_stride + at * a.v_token_stride;
  }
  __device__ void NoteBad(const RowsAppend& a, int value, int element) const {
    atomicMin(a.bad, MakeBadRow(token_, a.first_head + head_, value, element));
  }
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
        if (row >= rows) continue;
        const RowMove move(a, row);
        move.Store(a, chunk, move.Checked(a, chunk, bytes[n]));
      }
    }
  }
}

constexpr int kInt8Warps = 8;
// Encoding takes more time than the link does, so it takes more blocks.
constexpr unsigned kInt8Blocks = 128;

// The same for rows of 8 bits.
__global__ void __launch_bounds__(kInt8Warps * 32) Int8RowsAppendKernel(RowsAppend a) {
  __shared__ __align__(16) std::byte stored[kInt8Warps][kInt8RowBytesMax];
  std::byte* const own = stored[threadIdx.x / 32];
  const int chunks = static_cast<int>(a.row_bytes / 16);
  const auto rows = static_cast<uint32_t>(a.head_count * (a.end - a.begin));
  for (uint32_t row = blockIdx.x * kInt8Warps + threadIdx.x / 32; row < rows;
       row += gridDim.x * kInt8Warps) {
    const RowMove move(a, row);
    move.Encode(a, own);
    for (int chunk = threadIdx.x % 32; chunk < chunks; chunk += 32) {
      move.Store(a, chunk, reinterpret_cast<const uint4*>(own)[chunk]);
    }
    __syncwarp();
  }
}

}  // namespace

cudaError_t LaunchRowsAppend(const RowsAppend& append, cudaStream_t stream) {
  const int64_t rows = append.head_count * (append.end - append.begin);
  if (rows == 0) return cudaSuccess;
  if (append.row_type == RowType::kInt8) {
    const auto blocks =
        static_cast<unsigned>(std::min<int64_t>((rows + kInt8Warps - 1) / kInt8Warps, kInt8Blocks));
    return Launch<Int8RowsAppendKernel>({{blocks}, kInt8Warps * 32}, stream, append);
  }
  constexpr int kWarps = kThreads / 32;
  const auto blocks = static_cast<unsigned>(std::min<int64_t>(
      (rows + kWarps - 1) / kWarps, append.writes_pages ? kBlocks : kBlocksOnGpu));
  return Launch<RowsAppendKernel>({{blocks}, kThreads}, stream, append);
}

}  // namespace spillway::cuda
