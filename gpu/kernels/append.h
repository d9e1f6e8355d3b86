#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>

// What an append writes to GPU memory: the rows that stay there, and the addresses of new pages.
// All lists are in pinned memory.
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
  int64_t copy_count = 0;  // at most kCopiesOfRow per appended row
};
// To the resident sample, to the ring of the newest rows, and to the whole pages (ResidentRows).
inline constexpr int kCopiesOfRow = 3;

// The appends of a step. Its launch depends only on these fields, so that it can be part of a
// graph: the numbers of updates and copies are read from memory.
struct StepAppend {
  int64_t row_bytes = 0;
  // Appended rows of all KV heads; 0: nothing is appended.
  int row_count = 0;
  const TableUpdate* updates = nullptr;
  const RowCopy* copies = nullptr;
  const AppendCounts* counts = nullptr;
  // When the append began, in ns of the GPU's clock; null: not written.
  uint64_t* begins = nullptr;

  bool operator==(const StepAppend&) const = default;
};

// Copies the rows of tokens [begin, end) of KV heads [0, head_count). For page p of head h, the
// source page is at from[h * capacity + p] and the target page at to[h * capacity + p].
struct WholeCopy {
  const std::byte* const* from = nullptr;  // pages in pinned memory
  const std::byte* const* to = nullptr;
  int64_t capacity = 0;
  int head_count = 0;
  int64_t begin = 0;
  int64_t end = 0;
  int64_t row_bytes = 0;
};

// Launchers; they do not wait. LaunchStepAppend launches nothing if no row is appended.
cudaError_t LaunchStepAppend(const StepAppend& append, cudaStream_t stream);
// Sets *slot = value for each update. REQUIRES: count > 0.
cudaError_t LaunchTableUpdates(const TableUpdate* updates, int64_t count, cudaStream_t stream);
cudaError_t LaunchRowCopies(const RowCopy* copies, int64_t count, int64_t row_bytes,
                            cudaStream_t stream);
cudaError_t LaunchWholeCopy(const WholeCopy& copy, cudaStream_t stream);

}  // namespace spillway::cuda
