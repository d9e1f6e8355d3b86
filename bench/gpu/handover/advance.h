#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

namespace spillway::bench {

// Lies in GPU memory that both processes map. Each flag holds the number of the last round that was
// handed to the peer (go) or back to the runner (done). Each has its own cache line.
struct alignas(128) DeviceBlock {
  alignas(128) uint32_t go;    // written by the runner
  alignas(128) uint32_t done;  // written by the peer
  // Both processes add one in each round. wrong_count: how many kernels found another value than
  // the order of rounds requires.
  alignas(128) uint32_t counter;
  uint32_t wrong_count;
};

// One turn of one process. The pointers are addresses that the GPU can access.
struct Advance {
  DeviceBlock* block = nullptr;
  uint32_t expected = 0;  // the counter's value before this turn
  int64_t work_ns = 0;    // how long the kernel spins first
  // The kernel writes flag_value here last. null: it does not, since the stream signals instead.
  uint32_t* flag = nullptr;
  uint32_t flag_value = 0;
};

cudaError_t LaunchAdvance(const Advance& advance, cudaStream_t stream);

}  // namespace spillway::bench
