#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>
#include <span>
#include <vector>

#include "absl/status/status.h"
#include "bench/gpu/link/gather_launch.h"
#include "bench/gpu/link/plan.h"

namespace spillway::bench {

// Whether the CUDA that this program is built with has cudaMemcpyBatchAsync.
bool BatchCopyAvailable();

// Moves one list of rows in one direction. Everything is prepared, so that issuing the transfer
// needs only the calls of its engine.
class Transfer {
 public:
  // rows: a copy of t.rows in host memory. It and the memory that t points to must outlive the
  // transfer. sm_count: for the engines that are kernels.
  Transfer(Engine engine, bool to_host, const RowTransfer& t, std::span<const uint32_t> rows,
           int sm_count);

  const RowTransfer& rows() const { return t_; }
  bool to_host() const { return to_host_; }

 private:
  friend absl::Status Issue(std::span<const Transfer> transfers,
                            std::span<const cudaStream_t> streams);
  absl::Status LaunchKernel(cudaStream_t stream) const;
  absl::Status CopyBatch(cudaStream_t stream) const;
  // Copies row i of the list with the copy engine.
  absl::Status CopyRow(uint32_t i, cudaStream_t stream) const;
  std::byte* Hosted(uint32_t i) const;
  std::byte* Packed(uint32_t i) const;

  Engine engine_;
  bool to_host_;
  RowTransfer t_;
  std::span<const uint32_t> rows_;
  int sm_count_;
  // Only for kBatch: [row_count] each.
  std::vector<void*> to_;
  std::vector<const void*> from_;
  std::vector<size_t> sizes_;
};

// Queues each transfer on its stream. Copies of single rows are queued in turn for all transfers,
// so that both directions start together. REQUIRES: all transfers have the same engine and the same
// number of rows.
absl::Status Issue(std::span<const Transfer> transfers, std::span<const cudaStream_t> streams);

}  // namespace spillway::bench
