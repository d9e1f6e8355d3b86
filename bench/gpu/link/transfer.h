#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>
#include <span>
#include <vector>

#include "absl/status/status.h"
#include "bench/gpu/link/gather_launch.h"
#include "bench/gpu/link/plan.h"

namespace spillway::bench {

// Whether the CUDA that this program is built with copies in batches.
bool BatchCopyAvailable();

// The movement of one list of rows one way, made ready so that issuing it
// takes no more than its engine's own calls.
class Transfer {
 public:
  // rows: what t.rows holds, in host memory; it and what t points to outlive
  // the transfer. sm_count: for kernels.
  Transfer(Engine engine, bool to_host, const RowTransfer& t, std::span<const uint32_t> rows,
           int sm_count);

  const RowTransfer& rows() const { return t_; }
  bool to_host() const { return to_host_; }

 private:
  friend absl::Status Issue(std::span<const Transfer> transfers,
                            std::span<const cudaStream_t> streams);
  absl::Status LaunchKernel(cudaStream_t stream) const;
  absl::Status CopyBatch(cudaStream_t stream) const;
  // Row i of the list, by the copy engine.
  absl::Status CopyRow(uint32_t i, cudaStream_t stream) const;
  std::byte* Hosted(uint32_t i) const;
  std::byte* Packed(uint32_t i) const;

  Engine engine_;
  bool to_host_;
  RowTransfer t_;
  std::span<const uint32_t> rows_;
  int sm_count_;
  // For batches: [row_count] each.
  std::vector<void*> to_;
  std::vector<const void*> from_;
  std::vector<size_t> sizes_;
};

// Queues transfers, each on its stream; copies row by row are queued in turn,
// so that both ways start together. REQUIRES: all have one engine and as many
// rows.
absl::Status Issue(std::span<const Transfer> transfers, std::span<const cudaStream_t> streams);

}  // namespace spillway::bench
