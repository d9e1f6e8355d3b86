#pragma once

#include <cuda_runtime_api.h>
#include <sys/prctl.h>

#include <chrono>
#include <thread>

namespace spillway::cuda {

// Makes sleeps of this thread as short as requested. By default they take 50 us longer.
inline void LetSleepsBeShort() { prctl(PR_SET_TIMERSLACK, 1000UL, 0UL, 0UL, 0UL); }

// Polls a query of a stream or event until the result is not cudaErrorNotReady, and returns the
// result. Polls without pause for the time `busy`, then sleeps 20 us between queries. Calls
// `meanwhile` after each query that is not ready.
template <typename Query, typename Meanwhile>
cudaError_t Poll(const Query& query, std::chrono::steady_clock::duration busy,
                 const Meanwhile& meanwhile) {
  const auto begin = std::chrono::steady_clock::now();
  cudaError_t error = cudaErrorNotReady;
  while ((error = query()) == cudaErrorNotReady) {
    meanwhile();
    if (std::chrono::steady_clock::now() - begin > busy) {
      std::this_thread::sleep_for(std::chrono::microseconds(20));
    }
  }
  return error;
}

}  // namespace spillway::cuda
