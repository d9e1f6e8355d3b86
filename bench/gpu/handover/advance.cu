#include "bench/gpu/handover/advance.h"

namespace spillway::bench {
namespace {

__device__ uint64_t Now() {
  uint64_t time;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(time));
  return time;
}

// Runs with one thread. The counter is volatile, because this SM's cache may still hold its value
// from an earlier round.
__global__ void AdvanceKernel(Advance a) {
  if (a.work_ns > 0) {
    for (const uint64_t start = Now(); Now() - start < static_cast<uint64_t>(a.work_ns);) {
    }
  }
  volatile uint32_t* const counter = &a.block->counter;
  const uint32_t found = *counter;
  if (found != a.expected) atomicAdd(&a.block->wrong_count, 1);
  *counter = found + 1;
  if (a.flag != nullptr) {
    __threadfence_system();
    *static_cast<volatile uint32_t*>(a.flag) = a.flag_value;
  }
}

}  // namespace

cudaError_t LaunchAdvance(const Advance& advance, cudaStream_t stream) {
  AdvanceKernel<<<1, 1, 0, stream>>>(advance);
  return cudaGetLastError();
}

}  // namespace spillway::bench
