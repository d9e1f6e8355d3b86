#include "gpu/device/gpu_rows.h"

#include <algorithm>
#include <string>

#include "absl/strings/str_cat.h"
#include "gpu/cuda/error.h"

namespace spillway::cuda {
namespace {

constexpr int64_t kAlignment = 16;
// Fewest bytes of a row's K or V: copies of many shorter rows are slow.
constexpr int64_t kEngineHalfBytesMin = 128;

// Copies `count` pieces of `bytes` bytes.
cudaError_t CopyPieces(std::byte* to, int64_t to_stride, const std::byte* from, int64_t from_stride,
                       int64_t bytes, int64_t count, cudaMemcpyKind kind, cudaStream_t stream) {
  const auto width = static_cast<size_t>(bytes);
  // A pitched copy would end behind the row, and thus behind the extent if it is the last one.
  if (count == 1) return cudaMemcpyAsync(to, from, width, kind, stream);
  return cudaMemcpy2DAsync(to, static_cast<size_t>(to_stride), from,
                           static_cast<size_t>(from_stride), width, static_cast<size_t>(count),
                           kind, stream);
}

}  // namespace

absl::Status CheckInGpu(const Gpu& gpu, std::string_view name, const void* address) {
  cudaPointerAttributes attributes{};
  SPILLWAY_CUDA_RETURN_IF_ERROR(cudaPointerGetAttributes(&attributes, address));
  if (attributes.type == cudaMemoryTypeDevice && attributes.device == gpu.ordinal) {
    return absl::OkStatus();
  }
  return absl::InvalidArgumentError(
      absl::StrCat(std::string(name), " is not in the memory of ", std::string(gpu.name)));
}

absl::Status CheckAligned(std::string_view name, const void* data, int64_t head_stride,
                          int64_t token_stride) {
  const int64_t together = reinterpret_cast<intptr_t>(data) | head_stride | token_stride;
  if (together % kAlignment == 0) return absl::OkStatus();
  return absl::InvalidArgumentError(
      absl::StrCat("rows of ", std::string(name), " are not aligned to ", kAlignment, " bytes"));
}

bool EngineMoves(int64_t half_bytes, int64_t k_token_stride, int64_t v_token_stride) {
  return half_bytes >= kEngineHalfBytesMin && k_token_stride >= half_bytes &&
         v_token_stride >= half_bytes;
}

int64_t EngineRun(const LayerRows& rows, int kv_head, int64_t token, int64_t adjacent) {
  const int64_t row_bytes = rows.row_bytes();
  // CUDA copies only within one registered extent. V's last pitch ends half a row behind the last
  // row.
  const int64_t bytes = rows.BytesToExtentEnd(rows.Row(kv_head, token));
  return std::clamp<int64_t>((bytes - row_bytes / 2) / row_bytes, 1, adjacent);
}

cudaError_t EngineToRows(std::byte* row, int64_t row_bytes, const std::byte* k,
                         int64_t k_token_stride, const std::byte* v, int64_t v_token_stride,
                         int64_t count, cudaStream_t stream) {
  const int64_t half = row_bytes / 2;
  const cudaError_t copied =
      CopyPieces(row, row_bytes, k, k_token_stride, half, count, cudaMemcpyDeviceToHost, stream);
  if (copied != cudaSuccess) return copied;
  return CopyPieces(row + half, row_bytes, v, v_token_stride, half, count, cudaMemcpyDeviceToHost,
                    stream);
}

cudaError_t EngineFromRows(const std::byte* row, int64_t row_bytes, std::byte* k,
                           int64_t k_token_stride, std::byte* v, int64_t v_token_stride,
                           int64_t count, cudaStream_t stream) {
  const int64_t half = row_bytes / 2;
  const cudaError_t copied =
      CopyPieces(k, k_token_stride, row, row_bytes, half, count, cudaMemcpyHostToDevice, stream);
  if (copied != cudaSuccess) return copied;
  return CopyPieces(v, v_token_stride, row + half, row_bytes, half, count, cudaMemcpyHostToDevice,
                    stream);
}

}  // namespace spillway::cuda
