#pragma once

#include <cuda_runtime_api.h>
#include <sys/prctl.h>

#include <chrono>
#include <thread>

namespace spillway::cuda {

// Sleeps of this thread are as short as they are asked for; without it they take 50 us more.
inline void LetSleepsBeShort() { prctl(PR_SET_TIMERSLACK, 1000UL, 0UL, 0UL, 0UL); }

// Waits until a query of a stream or an event answers other than cudaErrorNotReady, and
// returns that: busily for so long, then without holding a core. meanwhile is called
// between two looks.
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
