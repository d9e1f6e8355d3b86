#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>

// What an append of few tokens brings to the GPU: the rows that it holds, and
// the addresses of new pages. All lists lie in pinned memory.
namespace spillway::cuda {

struct TableUpdate {
  uint64_t* slot = nullptr;  // device
  uint64_t value = 0;
};

struct RowCopy {
  const std::byte* from = nullptr;  // pinned
  std::byte* to = nullptr;          // device
};

struct AppendCounts {
  int64_t update_count = 0;
  int64_t copy_count = 0;  // kCopiesOfRow a row that is appended, or less
};
// To the sample, the ring, and the copy of all rows.
inline constexpr int kCopiesOfRow = 3;

// The appends of a step. What it launches depends on nothing else, so that it
// can be part of a graph: how many updates and copies there are lies in memory.
struct StepAppend {
  int64_t row_bytes = 0;
  // Of all KV heads; 0: nothing is appended.
  int row_count = 0;
  const TableUpdate* updates = nullptr;
  const RowCopy* copies = nullptr;
  const AppendCounts* counts = nullptr;
  // Written unless null: when it began, ns of the GPU's clock.
  uint64_t* begins = nullptr;

  bool operator==(const StepAppend&) const = default;
};

// Rows of tokens [begin, end) of KV heads [0, head_count): page p of head h lies at
// from[h * capacity + p] and goes to to[h * capacity + p].
struct WholeCopy {
  const std::byte* const* from = nullptr;  // pages in pinned memory
  const std::byte* const* to = nullptr;
  int64_t capacity = 0;
  int head_count = 0;
  int64_t begin = 0;
  int64_t end = 0;
  int64_t row_bytes = 0;
};

// Launchers; nothing waits. Nothing if no row is appended.
cudaError_t LaunchStepAppend(const StepAppend& append, cudaStream_t stream);
// *slot = value.
cudaError_t LaunchTableUpdates(const TableUpdate* updates, int64_t count, cudaStream_t stream);
cudaError_t LaunchRowCopies(const RowCopy* copies, int64_t count, int64_t row_bytes,
                            cudaStream_t stream);
cudaError_t LaunchWholeCopy(const WholeCopy& copy, cudaStream_t stream);

}  // namespace spillway::cuda
