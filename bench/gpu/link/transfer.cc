#include "bench/gpu/link/transfer.h"

#include <cassert>

#include "gpu/cuda/error.h"
#include "host/base/status_macros.h"

namespace spillway::bench {

bool BatchCopyAvailable() { return CUDART_VERSION >= 12080; }

Transfer::Transfer(Engine engine, bool to_host, const RowTransfer& t,
                   std::span<const uint32_t> rows, int sm_count)
    : engine_(engine), to_host_(to_host), t_(t), rows_(rows), sm_count_(sm_count) {
  assert(rows.size() == t.row_count);
  if (engine_ != Engine::kBatch) return;
  to_.resize(t.row_count);
  from_.resize(t.row_count);
  sizes_.assign(t.row_count, size_t{1} << t.row_bytes_log2);
  for (uint32_t i = 0; i < t.row_count; ++i) {
    to_[i] = to_host ? Hosted(i) : Packed(i);
    from_[i] = to_host ? Packed(i) : Hosted(i);
  }
}

std::byte* Transfer::Hosted(uint32_t i) const {
  return t_.span + (uint64_t{rows_[i]} << t_.row_bytes_log2);
}

std::byte* Transfer::Packed(uint32_t i) const {
  return t_.packed + (uint64_t{i} << t_.row_bytes_log2);
}

absl::Status Transfer::LaunchKernel(cudaStream_t stream) const {
  if (engine_ == Engine::kBulk) {
    SPILLWAY_CUDA_RETURN_IF_ERROR(LaunchBulkRows(t_, to_host_, sm_count_, stream));
  } else {
    SPILLWAY_CUDA_RETURN_IF_ERROR(LaunchSmRows(t_, to_host_, sm_count_, stream));
  }
  return absl::OkStatus();
}

absl::Status Transfer::CopyRow(uint32_t i, cudaStream_t stream) const {
  const size_t bytes = size_t{1} << t_.row_bytes_log2;
  if (to_host_) {
    SPILLWAY_CUDA_RETURN_IF_ERROR(
        cudaMemcpyAsync(Hosted(i), Packed(i), bytes, cudaMemcpyDeviceToHost, stream));
  } else {
    SPILLWAY_CUDA_RETURN_IF_ERROR(
        cudaMemcpyAsync(Packed(i), Hosted(i), bytes, cudaMemcpyHostToDevice, stream));
  }
  return absl::OkStatus();
}

absl::Status Transfer::CopyBatch([[maybe_unused]] cudaStream_t stream) const {
#if CUDART_VERSION >= 12080
  cudaMemcpyAttributes attributes = {};
  attributes.srcAccessOrder = cudaMemcpySrcAccessOrderStream;
  size_t first = 0;
  const size_t count = to_.size();
#if CUDART_VERSION >= 13000
  SPILLWAY_CUDA_RETURN_IF_ERROR(cudaMemcpyBatchAsync(const_cast<void* const*>(to_.data()),
                                                     from_.data(), sizes_.data(), count,
                                                     &attributes, &first, 1, stream));
#else
  size_t failed = 0;
  SPILLWAY_CUDA_RETURN_IF_ERROR(cudaMemcpyBatchAsync(
      const_cast<void**>(to_.data()), const_cast<void**>(from_.data()),
      const_cast<size_t*>(sizes_.data()), count, &attributes, &first, 1, &failed, stream));
#endif
  return absl::OkStatus();
#else
  return absl::UnimplementedError("this program's CUDA has no cudaMemcpyBatchAsync");
#endif
}

absl::Status Issue(std::span<const Transfer> transfers, std::span<const cudaStream_t> streams) {
  assert(!transfers.empty() && transfers.size() == streams.size());
  const Engine engine = transfers[0].engine_;
  if (engine == Engine::kCopyEngine) {
    for (uint32_t i = 0; i < transfers[0].t_.row_count; ++i) {
      for (size_t way = 0; way < transfers.size(); ++way) {
        absl::Status status = transfers[way].CopyRow(i, streams[way]);
        if (!status.ok()) return status;
      }
    }
    return absl::OkStatus();
  }
  for (size_t way = 0; way < transfers.size(); ++way) {
    RETURN_IF_ERROR(engine == Engine::kBatch ? transfers[way].CopyBatch(streams[way])
                                             : transfers[way].LaunchKernel(streams[way]));
  }
  return absl::OkStatus();
}

}  // namespace spillway::bench
