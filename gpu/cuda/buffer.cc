#include "gpu/cuda/buffer.h"

namespace spillway::cuda {

absl::StatusOr<DeviceBuffer> DeviceBuffer::Create(int64_t bytes, MemoryBudget* budget,
                                                  std::string_view what) {
  absl::StatusOr<MemoryReservation> reservation = budget->Reserve(bytes, what);
  if (!reservation.ok()) return reservation.status();
  void* data = nullptr;
  const cudaError_t error = cudaMalloc(&data, static_cast<size_t>(bytes));
  if (error == cudaErrorMemoryAllocation) {
    cudaGetLastError();
    size_t free = 0, total = 0;
    cudaMemGetInfo(&free, &total);
    return MemoryExhausted(what, bytes, static_cast<int64_t>(free));
  }
  SPILLWAY_CUDA_RETURN_IF_ERROR(error);
  DeviceBuffer buffer;
  buffer.data_ = static_cast<std::byte*>(data);
  buffer.bytes_ = bytes;
  buffer.reservation_ = *std::move(reservation);
  return buffer;
}

absl::StatusOr<PinnedBuffer> PinnedBuffer::Create(int64_t bytes, MemoryBudget* budget,
                                                  std::string_view what) {
  absl::StatusOr<MemoryReservation> reservation = budget->Reserve(bytes, what);
  if (!reservation.ok()) return reservation.status();
  void* data = nullptr;
  SPILLWAY_CUDA_RETURN_IF_ERROR(cudaHostAlloc(&data, static_cast<size_t>(bytes),
                                              cudaHostAllocPortable | cudaHostAllocMapped));
  PinnedBuffer buffer;
  buffer.data_ = static_cast<std::byte*>(data);
  buffer.bytes_ = bytes;
  buffer.reservation_ = *std::move(reservation);
  return buffer;
}

}  // namespace spillway::cuda
