#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

namespace spillway::bench {

// In GPU memory that both processes map. A flag is the number of the last round
// that was handed over, or to be handed back; each has a cache line.
struct alignas(128) DeviceBlock {
  alignas(128) uint32_t go;    // the runner writes it
  alignas(128) uint32_t done;  // the peer writes it
  // Both advance it by one each round; wrong_count counts the kernels that found
  // another value than the order of rounds gives.
  alignas(128) uint32_t counter;
  uint32_t wrong_count;
};

// One turn of one process. Pointers are to memory that the GPU reaches.
struct Advance {
  DeviceBlock* block = nullptr;
  uint32_t expected = 0;  // the counter before
  int64_t work_ns = 0;    // time to spend first
  // Where to write flag_value after all else; null: the stream signals.
  uint32_t* flag = nullptr;
  uint32_t flag_value = 0;
};

cudaError_t LaunchAdvance(const Advance& advance, cudaStream_t stream);

}  // namespace spillway::bench
