#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>

namespace spillway::bench {

// Rows in pinned host memory (the span), and the same rows side by side in GPU memory (packed).
// A plain struct that kernels take by value.
struct RowTransfer {
  // Host memory that the GPU reads and writes in place; 16-byte aligned.
  std::byte* span = nullptr;
  // [row_count] distinct row numbers in the span; in GPU memory.
  const uint32_t* rows = nullptr;
  // [row_count][row_bytes]; in GPU memory, 128-byte aligned.
  std::byte* packed = nullptr;
  uint32_t row_count = 0;
  // log2 of row_bytes; row_bytes is a power of two and at least 16.
  int row_bytes_log2 = 0;

  int64_t bytes() const { return int64_t{row_count} << row_bytes_log2; }
};

// The result of LaunchCheckPattern, in GPU memory. The launch sets it to zero first.
struct PatternCheck {
  unsigned long long wrong_word_count;
};

// All launches are asynchronous on the stream, and return only errors of the launch itself.
// Launches that move rows run sm_count blocks, one per multiprocessor. REQUIRES: 0 < sm_count <=
// the number of multiprocessors; t.bytes() is below 32 GiB.

// Every thread moves 16 bytes at a time between span and packed.
cudaError_t LaunchSmRows(const RowTransfer& t, bool to_host, int sm_count, cudaStream_t stream);

// Bulk copies (cp.async.bulk) by way of shared memory.
// REQUIRES: BulkRowsAvailable().
cudaError_t LaunchBulkRows(const RowTransfer& t, bool to_host, int sm_count, cudaStream_t stream);

// Whether the current GPU has bulk copies (compute capability 9.0) and this
// program was built for them.
bool BulkRowsAvailable();

// Fills packed with what the pattern gives for its rows.
cudaError_t LaunchFillPattern(const RowTransfer& t, cudaStream_t stream);

// Counts the 8-byte words of packed that differ from the pattern.
cudaError_t LaunchCheckPattern(const RowTransfer& t, PatternCheck* check, cudaStream_t stream);

// Keeps the stream busy for this time, so that the host can queue more work behind it.
cudaError_t LaunchHold(int64_t nanoseconds, cudaStream_t stream);

}  // namespace spillway::bench
